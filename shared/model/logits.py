"""Changes logits before a token is drawn from them. Knows nothing of queues, messages or text.

What a processor does may depend on the tokens so far, which it is told one after the other. Each
operation is one of binary32, element by element, so that the same tokens give the same logits on
every machine. The order is vLLM's: bias, then repetition, frequency and presence.

V vocab_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.kernel.matrix import Float32


class LogitsProcessor(Protocol):
    """One thing that is done to the logits of one sequence (vLLM's name)."""

    def process(self, logits: Float32) -> None:
        """Change the logits (V,) of the next token, in place. -infinity forbids a token."""

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn; the next logits are those after it."""


def make_processors(
    *,
    prompt: Iterable[int],
    logit_bias: Sequence[tuple[int, float]] = (),
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> list[LogitsProcessor]:
    """What these parameters ask for, in the order in which it is to be done."""
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(LogitBias(logit_bias))
    if repetition_penalty != 1.0 or frequency_penalty or presence_penalty:
        processors.append(
            Penalties(
                prompt=prompt,
                repetition=repetition_penalty,
                frequency=frequency_penalty,
                presence=presence_penalty,
            )
        )
    return processors


class LogitBias:
    """logit + bias, of the given tokens."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._ids = np.array([token_id for token_id, _ in biases], np.intp)
        self._biases = np.array([bias for _, bias in biases], np.float32)

    def process(self, logits: Float32) -> None:
        logits[self._ids] += self._biases

    def advance(self, token_id: int) -> None:
        pass


class Penalties:
    """Of each token that was seen: logit / repetition if it is over 0, else logit * repetition;
    then - frequency * (times generated); then - presence if it was generated.

    Those of the prompt were seen, and not generated. Holds what was seen, not the vocabulary.
    """

    def __init__(
        self, *, prompt: Iterable[int], repetition: float, frequency: float, presence: float
    ) -> None:
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        seen = sorted(set(prompt)) if repetition != 1.0 else []
        self._slots = {token_id: slot for slot, token_id in enumerate(seen)}
        self._ids = np.array([*seen, *[0] * 64], np.intp)  # the first len(_slots) count
        self._counts = np.zeros(len(self._ids), np.float32)

    def process(self, logits: Float32) -> None:
        num_seen = len(self._slots)
        ids, counts = self._ids[:num_seen], self._counts[:num_seen]
        seen: npt.NDArray[np.float32] = logits[ids]
        if self._repetition != 1:
            seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        if self._frequency:
            seen = seen - self._frequency * counts
        if self._presence:
            seen = seen - self._presence * (counts > 0).astype(np.float32)
        logits[ids] = seen

    def advance(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1
