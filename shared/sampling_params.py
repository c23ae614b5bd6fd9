"""How the next token is drawn, as a value. Knows no message, wire or arithmetic."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from shared.errors import RequestError
from shared.logprobs import MAX_TOP_LOGPROBS

MAX_TOKENS_LIMIT = 1_048_576
MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_BIAS_ID = 999_999_999
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 300
# A token id as a text, the key of a bias as OpenAI writes it: one text for each id.
BIAS_KEY = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")
# Below and above, a logit could leave binary32.
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn (vLLM's names).

    `temperature` 0 is greedy and ignores the rest of what draws; `top_k` 0, `top_p` 1 and `min_p` 0
    are off. `seed` None lets the scheduler draw one, which the ledger then records, so that a
    repeat is exact. `speculation` lets the last group guess tokens ahead; it changes the time,
    never the tokens.

    Greedy or not, the logits are shaped first: `logit_bias` (token id, bias) is added; what stands
    in prompt or answer is divided by `repetition_penalty`, or multiplied below 0; what stands in
    the answer loses `frequency_penalty` for each time and `presence_penalty` once.

    `logprobs` None is off; else the log probability of each token is told, and those of so many
    likeliest ones. They are the model's own, before anything of the above.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    ignore_eos: bool = False
    speculation: bool = True
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise RequestError(
                f"temperature must be in 0..100, got {self.temperature!r}", param="temperature"
            )
        if not 0 <= self.top_k <= 2**31 - 1:
            raise RequestError(
                f"top_k must be 0 (off) or positive, got {self.top_k!r}", param="top_k"
            )
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p!r}", param="top_p")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p must be in 0..1, got {self.min_p!r}", param="min_p")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed must be in 0..2**64-1, got {self.seed!r}", param="seed")
        if not 1 <= self.max_tokens <= MAX_TOKENS_LIMIT:
            raise RequestError(
                f"max_tokens must be in 1..{MAX_TOKENS_LIMIT}, got {self.max_tokens!r}",
                param="max_tokens",
            )
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if not -MAX_PENALTY <= penalty <= MAX_PENALTY:  # NaN is neither
                raise RequestError(f"{name} must be in -2..2, got {penalty!r}", param=name)
        if not MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise RequestError(
                f"repetition_penalty must be in {MIN_REPETITION}..{MAX_REPETITION:g} (1 is off), "
                f"got {self.repetition_penalty!r}",
                param="repetition_penalty",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"logprobs must be in 0..{MAX_TOP_LOGPROBS} or null, got {self.logprobs!r}",
                param="logprobs",
            )
        if self.logit_bias:
            self._check_bias()

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias must be at most {MAX_BIASES} tokens, got {len(self.logit_bias)}",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id <= MAX_BIAS_ID:
                raise RequestError(
                    f"logit_bias token id must be in 0..{MAX_BIAS_ID}, got {token_id!r}",
                    param="logit_bias",
                )
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(
                    f"logit_bias of token {token_id} must be in -100..100, got {bias!r}",
                    param="logit_bias",
                )
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise RequestError("logit_bias names a token twice", param="logit_bias")

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits are changed before a token is drawn from them."""
        return bool(
            self.logit_bias
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
        )

    def of_steps(self) -> SamplingParams:
        """What each step carries: all but what shapes logits, which is read in the ledger."""
        if not self.shapes_logits:
            return self
        return replace(
            self,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=(),
        )
