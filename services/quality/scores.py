"""Compares distributions of the next token: perplexity, divergence, agreement. Knows no model.

All in binary64. n positions, V vocab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.kernel.matrix import Float32

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean loss over `num_scored` tokens; `error` is one standard error of it."""

    value: float
    error: float
    mean_loss: float
    num_scored: int

    @classmethod
    def of(cls, losses: Float64) -> Perplexity:
        """Of losses (n,) in nats, those of the tokens in the order of the text."""
        mean = float(losses.mean())
        value = math.exp(mean)
        return cls(value, value * _standard_error(losses), mean, len(losses))


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model's distributions are from a reference's, over the scored positions.

    KL is sum of p_ref * ln(p_ref / p), in nats. `top1_agreement` is the share of positions at which
    both find the same token likeliest.
    """

    mean_kl: float
    kl_error: float
    median_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    perplexity_ratio: float


def log_softmax(logits: Float32) -> Float64:
    """(n, V) -> (n, V), natural logarithms of probabilities."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


@dataclass
class Scores:
    """Collects positions in the order of the text."""

    losses: list[Float64] = field(default_factory=list)

    def add(self, log_probabilities: Float64, targets: npt.NDArray[np.int32]) -> None:
        """Of n positions: (n, V), and the tokens that came next, (n,)."""
        self.losses.append(-log_probabilities[np.arange(len(targets)), targets])

    def perplexity(self) -> Perplexity:
        return Perplexity.of(np.concatenate(self.losses))


@dataclass
class Comparison:
    """Collects the divergence from a reference, position by position."""

    kls: list[Float64] = field(default_factory=list)
    agreements: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, ours: Float64, reference: Float64) -> None:
        """Logarithms of probabilities of n positions, (n, V) each."""
        difference = reference - ours
        self.kls.append(np.einsum("nv,nv->n", np.exp(reference), difference))
        self.agreements.append(ours.argmax(axis=1) == reference.argmax(axis=1))

    def mean_kl(self) -> float:
        """In nats. What rounding in binary64 leaves below 0 counts as 0."""
        return float(np.maximum(np.concatenate(self.kls), 0.0).mean())

    def divergence(self, perplexity: Perplexity, reference: Perplexity) -> Divergence:
        kls = np.maximum(np.concatenate(self.kls), 0.0)
        return Divergence(
            mean_kl=float(kls.mean()),
            kl_error=_standard_error(kls),
            median_kl=float(np.median(kls)),
            p99_kl=float(np.percentile(kls, 99)),
            max_kl=float(kls.max()),
            top1_agreement=float(np.concatenate(self.agreements).mean()),
            perplexity_ratio=perplexity.value / reference.value,
        )


def _standard_error(values: Float64) -> float:
    if len(values) < 2:
        return 0.0
    return float(values.std(ddof=1)) / math.sqrt(len(values))
