"""Log probabilities of one token and of the likeliest ones, and their bytes. Knows no logits."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
_HEAD, _TOP = struct.Struct("<f"), struct.Struct("<if")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, binary32: of a token that was drawn, and of the likeliest (token id,
    log probability) in its place, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def pack(self) -> bytes:
        """4 bytes, and 8 for each of the likeliest."""
        return _HEAD.pack(self.logprob) + b"".join(_TOP.pack(*pair) for pair in self.top)

    @classmethod
    def unpack(cls, packed: bytes) -> TokenLogprobs:
        """What `pack` made. Raises `ValueError` for anything else."""
        num_top, rest = divmod(len(packed) - _HEAD.size, _TOP.size)
        if rest or not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"{len(packed)} bytes are no log probabilities")
        logprob: float = _HEAD.unpack_from(packed)[0]
        return cls(logprob, tuple(_TOP.iter_unpack(packed[_HEAD.size :])))
