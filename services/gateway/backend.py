"""What the gateway is wired to: a cluster, or the pipeline of this process. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.producer import Producer
from shared.store.completions import Completions
from shared.store.ledger_base import RequestLedger
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Backend:
    """`problem()` says why requests would not be answered now, "" for none; it may block.

    `gather_s`: how long a read of tokens waits for more of them.
    """

    producer: Producer
    ledger: RequestLedger
    completions: Completions
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_id: str
    vocab_size: int
    max_positions: int
    problem: Callable[[], str]
    gather_s: float

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.model_id.partition("@")[0]

    @property
    def fingerprint(self) -> str:
        """Which weights they are, as far as a client cares."""
        return f"fp_{self.model_id.partition('@')[2][:16]}"
