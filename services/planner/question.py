"""What is asked of the planner. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.planner.cost import slice_rows
from services.planner.placement import Wishes
from services.planner.slices import Demand
from services.planner.specs import ModelSpec
from shared.errors import ConfigError
from shared.topology import Wire

DEFAULT_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned. `prompt` tokens are part of `context`."""

    bits: int = 4
    context: int = 4096
    prompt: int = DEFAULT_PROMPT
    wire: Wire = Wire.F32
    wishes: Wishes = field(default_factory=Wishes)
    price_per_kwh: float = 0.5
    currency: str = "yuan"


def demand_of(model: ModelSpec, question: Question) -> Demand:
    rows = slice_rows(model)
    return Demand(model, question.bits, question.context, question.prompt, rows)


def check_question(model: ModelSpec, question: Question) -> None:
    wishes = question.wishes
    if not 1 <= question.prompt <= question.context:
        raise ConfigError(
            f"--prompt must be in 1..{question.context} (--context), got {question.prompt}"
        )
    if not wishes.max_token_s > 0:
        raise ConfigError(f"--max-token-time must be more than 0, got {wishes.max_token_s:g}")
    if not 0 <= question.price_per_kwh < math.inf:
        raise ConfigError(f"--price must be a number from 0 on, got {question.price_per_kwh:g}")
    if wishes.concurrency is not None and wishes.concurrency < 1:
        raise ConfigError(f"--concurrency must be 1 or more, got {wishes.concurrency}")
    if wishes.groups is not None and not 1 <= wishes.groups <= model.num_hidden_layers:
        raise ConfigError(
            f"--groups must be in 1..{model.num_hidden_layers} (the model's layers), "
            f"got {wishes.groups}"
        )
