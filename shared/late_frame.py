"""A step on its way whose frame is made late, or never. Knows no queue.

Brokers between processes ask for its bytes; the one inside a process hands it on as it is.
"""

from __future__ import annotations

from typing import SupportsBytes

from shared.codec import decode, encode
from shared.codec_fields import check_tensors
from shared.messages import Message, Step


class Frame:
    """The msgpack frame of a step, made when somebody asks for its bytes.

    Within one process nobody does, which saves a fifth of what a turn of a decode step takes beside
    the kernel. Nobody writes to the step's tensors again.
    Raises `ValueError` as `encode` does.
    """

    __slots__ = ("_body", "_step", "_tensor_bytes")

    def __init__(self, step: Step) -> None:
        self._tensor_bytes = check_tensors(step.tensors)
        self._step: Step | None = step
        self._body = b""

    def __bytes__(self) -> bytes:
        if (step := self._step) is not None:
            self._body = encode(step)
            self._step = None  # from now on it is like one that came from elsewhere
        return self._body

    def may_be_over(self, max_bytes: int) -> bool:
        step = self._step
        return step is None or self._tensor_bytes + _most_header_bytes(step) > max_bytes

    def step(self) -> Step | None:
        """What went in, unless somebody has seen the bytes."""
        return self._step


def read(content: SupportsBytes) -> Message:
    """The message in a msgpack frame. Raises what `decode` does."""
    if isinstance(content, Frame) and (step := content.step()) is not None:
        return step
    return decode(bytes(content))


def _most_header_bytes(step: Step) -> int:
    """No frame has more beside its tensors: a character is 4 bytes, a token 5, a worker 131; 2,048
    for names and numbers, 512 for each tensor's."""
    num_chars = len(step.model_id) + len(step.layout_id)
    num_tokens = len(step.stop_token_ids) + len(step.draft) + len(step.accepted)
    return 2048 + 4 * num_chars + 5 * num_tokens + 131 * len(step.route) + 512 * len(step.tensors)
