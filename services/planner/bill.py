"""What a pool's power costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

HOURS_A_YEAR = 365 * 24
JOULES_A_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Bill:
    """Power and its price; per million tokens at the planned rate."""

    watts: float
    kwh_a_year: float
    cost_a_year: float
    joules_a_million_tokens: float
    cost_a_million_tokens: float
    currency: str


def kwh_a_year(watts: float) -> float:
    return watts * HOURS_A_YEAR / 1e3


def bill(watts: float, tokens_per_s: float, *, price_per_kwh: float, currency: str) -> Bill:
    """All nodes draw their watts all year, busy or not."""
    joules = watts / tokens_per_s * 1e6
    return Bill(
        watts,
        kwh_a_year(watts),
        kwh_a_year(watts) * price_per_kwh,
        joules,
        joules / JOULES_A_KWH * price_per_kwh,
        currency,
    )
