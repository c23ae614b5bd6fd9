"""Damages frames: bytes flip, come or go, and values of another type or size take their places."""

from __future__ import annotations

import math
import random
from typing import Any


def mutate_bytes(body: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(body))
    match rng.randrange(5):
        case 0:
            return body[:at] + bytes([body[at] ^ (1 << rng.randrange(8))]) + body[at + 1 :]
        case 1:
            return body[:at] + rng.randbytes(rng.randint(1, 4)) + body[at:]
        case 2:
            return body[:at] + body[at + rng.randint(1, 4) :]
        case 3:
            return body[:at]
        case _:
            return (
                body[:at]
                + bytes([rng.choice(b"\x80\x90\xa0\xc0\xc1\xc4\xc7\xcf\xd4\xdd\xdf\xff")])
                + body[at + 1 :]
            )


ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.5, 1.5, math.nan,
    math.inf, "", "x", "f16", "\x00", b"", b"\x00" * 8, [], [[]], [1], [True], ["x"], {}, {"x": 1},
]  # fmt: skip


def mutate_structure(value: Any, rng: random.Random) -> Any:
    """Swap, drop or add one value at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate_structure(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at] + value[at + 1 :]
        return [*value[:at], mutate_structure(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)
