"""Numbers as people read them. Knows no plan."""

from __future__ import annotations

import math

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def human_bytes(value: float) -> str:
    """1.5 GB; decimal, as memory sizes of specs are."""
    return f"{scaled(value)}B"


def scaled(value: float) -> str:
    """Three digits and a prefix, with the space that a unit wants: `15.3 k`."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{three_digits(value / size)} {prefix}"
    return f"{three_digits(value)} "


def three_digits(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 9)}f}"


def human_seconds(seconds: float) -> str:
    """12.3 ms, 1.20 s, 36.0 s, 3.5 h."""
    if not math.isfinite(seconds):
        return "never"
    if seconds >= 2 * 86400:
        return f"{three_digits(seconds / 86400)} days"
    if seconds >= 2 * 3600:
        return f"{three_digits(seconds / 3600)} h"
    if seconds >= 1:
        return f"{three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{three_digits(seconds * 1e3)} ms"
    return f"{three_digits(seconds * 1e6)} µs"


def human_count(value: float) -> str:
    """Whole below ten thousand, 1.53e8 as 153 million."""
    if not math.isfinite(value):
        return "∞"
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if abs(value) >= size:
            return f"{three_digits(value / size)} {word}"
    return f"{value:,.0f}" if abs(value) >= 100 else three_digits(value)


def share(value: float) -> str:
    """A share in per cent, as many nines as it has."""
    if 0.999 < value < 1 - 5e-12:  # beyond that nine digits show no more than 100
        return f"{100 * value:.{min(9, 2 + math.ceil(-math.log10(1 - value)) - 2)}f} %"
    return f"{three_digits(100 * value)} %"


def times_full(utilisation: float) -> str:
    """A share in per cent, or how many times too little there is."""
    return share(utilisation) if utilisation <= 1 else f"{three_digits(utilisation)} x"
