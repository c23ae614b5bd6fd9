"""Makes the rope tables of a model. Knows no file format; the kernel only ever sees the tables.

What stretches a model's context changes the frequencies of its pairs, and for some kinds the length
of the rotated vectors; both go into the tables. P positions, hd head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError

RopeKind = Literal["linear", "llama3", "yarn", "longrope", "factors"]
ROPE_KINDS: tuple[RopeKind, ...] = ("linear", "llama3", "yarn", "longrope", "factors")
MAX_FACTORS = 1 << 12  # pairs of a head
LEAST, MOST = 1e-6, 1e9  # of numbers that scale; outside, tables could not be binary32

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model's rope frequencies differ from those of its base (Hugging Face's names).

    - linear: all divided by `factor` (https://arxiv.org/abs/2306.15595).
    - llama3: those of wavelengths over original/low_freq_factor divided by `factor`, those under
      original/high_freq_factor kept, a line between.
    - yarn: by parts, from `beta_fast` to `beta_slow` turns in the original length
      (https://arxiv.org/abs/2309.00071).
    - longrope: divided by `short_factors` or, where more positions are wanted than the original
      length has, by `long_factors`, pair by pair (https://arxiv.org/abs/2402.13753).
    - factors: divided by `short_factors`.

    `attention_factor` multiplies cos and sin.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(
                f"rope scaling {self.kind!r:.40} is not one of {', '.join(ROPE_KINDS)}"
            )
        for name in ("factor", "attention_factor", "low_freq_factor", "beta_fast", "beta_slow"):
            _require_plausible(f"rope scaling: {name}", getattr(self, name))
        if self.kind in ("llama3", "yarn", "longrope"):
            original = self.original_max_position_embeddings
            if type(original) is not int or not 1 <= original < 2**31:
                raise ModelError(
                    "rope scaling: original_max_position_embeddings must be a positive number, "
                    f"got {original!r:.40}"
                )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ModelError(
                f"rope scaling: high_freq_factor {self.high_freq_factor!r} is not above "
                f"low_freq_factor {self.low_freq_factor!r}"
            )
        if self.kind in ("longrope", "factors") and not self.short_factors:
            raise ModelError(f"rope scaling {self.kind}: its factors are missing")
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            if len(values) > MAX_FACTORS:
                raise ModelError(f"rope scaling: {name} has {len(values)} entries")
            for value in values:
                _require_plausible(f"rope scaling: {name}", value)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RopeScaling:
        """Build from `asdict`'s output, or its JSON. Raises `ModelError` naming the key."""
        if unknown := sorted(set(raw) - {field.name for field in fields(cls)}):
            raise ModelError(f"unknown keys in the rope scaling: {', '.join(unknown)}")
        values = dict(raw)
        try:
            for name in ("short_factors", "long_factors"):
                values[name] = tuple(values.get(name, ()))
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"a value of the rope scaling has the wrong type: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_pairs(self, num_pairs: int) -> None:
        """Raise `ModelError` unless there is one factor a pair, where there are any."""
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            if values and len(values) != num_pairs:
                raise ModelError(
                    f"rope scaling: {name} has {len(values)} entries, a head has {num_pairs} pairs"
                )

    def scaled(self, inverse: Float64, theta: float, num_positions: int) -> Float64:
        """The frequencies (n,) of the pairs, from those of the base."""
        match self.kind:
            case "linear":
                return np.asarray(inverse / self.factor)
            case "llama3":
                return self._by_wavelength(inverse)
            case "yarn":
                return self._by_parts(inverse, theta)
            case "longrope":
                is_long = num_positions > self.original_max_position_embeddings
                factors = self.long_factors if is_long else self.short_factors
                return np.asarray(inverse / np.array(factors or self.short_factors))
            case "factors":
                return np.asarray(inverse / np.array(self.short_factors))

    def _by_wavelength(self, inverse: Float64) -> Float64:
        wavelengths = self.original_max_position_embeddings * inverse / (2 * math.pi)  # turns
        smooth = (wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept = np.clip(smooth, 0.0, 1.0)
        scaled: Float64 = (1 - kept) * inverse / self.factor + kept * inverse
        return scaled

    def _by_parts(self, inverse: Float64, theta: float) -> Float64:
        dim = 2 * len(inverse)

        def pair_of(turns: float) -> float:
            """Which pair turns that often in the original length."""
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        kept = 1 - np.clip((np.arange(len(inverse)) - low) / width, 0.0, 1.0)
        scaled: Float64 = (1 - kept) * inverse / self.factor + kept * inverse
        return scaled


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, as the paper found it; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """sqrt(1 + ln(factor) / ln(original length)); 1 where nothing is stretched."""
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def rope_tables(
    theta: float,
    head_dim: int,
    num_positions: int,
    *,
    rows: range | None = None,
    rope_dim: int | None = None,
    scaling: RopeScaling | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin, float32 (P, hd/2): made in binary64, then rounded. With `rows`, those rows alone
    of tables that have `num_positions`.

    Angle of pair i at position p: p * theta ** (-2i / rope_dim) (RoFormer, 3.2.2). With a
    `rope_dim` below head_dim only the first rope_dim/2 pairs turn; the others have cos 1, sin 0.
    """
    rope_dim = head_dim if rope_dim is None else rope_dim
    exponents = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    inverse = np.float64(theta) ** -exponents
    length = 1.0
    if scaling is not None:
        inverse = scaling.scaled(inverse, theta, num_positions)
        length = scaling.attention_factor
    positions = np.array(range(num_positions) if rows is None else rows, np.float64)
    angles = np.outer(positions, inverse)
    cos = np.ones((len(positions), head_dim // 2), np.float32)
    sin = np.zeros_like(cos)
    cos[:, : len(inverse)] = length * np.cos(angles)
    sin[:, : len(inverse)] = length * np.sin(angles)
    return cos, sin


def _require_plausible(what: str, value: object) -> None:
    # bool is an int to Python; a config file may hold anything.
    if not (isinstance(value, int | float) and type(value) is not bool and LEAST <= value <= MOST):
        raise ModelError(f"{what} must lie in {LEAST:g}..{MOST:g}, got {value!r:.40}")
