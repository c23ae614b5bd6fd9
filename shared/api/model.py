"""The model behind an API, as far as bodies depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.model_names import name_of
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ApiModel:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_id: str
    vocab_size: int
    max_positions: int

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return name_of(self.model_id)

    @property
    def fingerprint(self) -> str:
        """Which weights they are, as far as a client cares."""
        return f"fp_{self.model_id.partition('@')[2][:16]}"
