"""Log probabilities of one token and of the likeliest ones, as bytes. Knows no logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
_HEAD, _TOP = struct.Struct("<f"), struct.Struct("<if")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms in binary32, little-endian: that of a token that was drawn, then (int32
    token id, its log probability) of the likeliest ones in its place, the likeliest first.

    Held as the store holds them: as objects they take ten times the memory, and most are only
    passed on. Raises `ValueError` for bytes of another length.
    """

    packed: bytes

    def __post_init__(self) -> None:
        num_top, rest = divmod(len(self.packed) - _HEAD.size, _TOP.size)
        if rest or not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"{len(self.packed)} bytes are no log probabilities")

    @classmethod
    def of(cls, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprobs:
        return cls(_HEAD.pack(logprob) + b"".join(_TOP.pack(*pair) for pair in top))

    @property
    def logprob(self) -> float:
        found: float = _HEAD.unpack_from(self.packed)[0]
        return found

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        return tuple(_TOP.iter_unpack(self.packed[_HEAD.size :]))
