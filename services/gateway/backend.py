"""What the gateway is wired to: a cluster, or the pipeline of this process. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.api.model import ApiModel
from shared.config import KEEP_ANSWERS_S
from shared.producer import Producer
from shared.store.completions import Completions
from shared.store.ledger_base import RequestLedger


@dataclass(frozen=True, slots=True)
class Backend(ApiModel):
    """`problem()` says why requests would not be answered now, "" for none; it may block.

    `gather_s`: how long a read of tokens waits for more of them. `keep_answers_s`: how long the
    ledger keeps an answer after its end.
    """

    producer: Producer
    ledger: RequestLedger
    completions: Completions
    problem: Callable[[], str]
    gather_s: float
    keep_answers_s: float = KEEP_ANSWERS_S
