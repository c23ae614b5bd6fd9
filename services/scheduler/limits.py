"""The bounds of one scheduler, as values."""

from __future__ import annotations

from dataclasses import dataclass

from shared.policy import RedriveLimits


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_in_flight` requests run at once, and as many may be waiting or settling. Of batches
    `max_batch_in_flight` run, and one beside a request that somebody waits for.

    `settle_after_s` is how long a request is kept in its queue after its end: until the end is on
    the store's disk. `reply_patience_s` is how long a full reply queue is tried.

    `kv_budget_bytes` bounds the KV rows of what runs at once; None leaves that to the store.
    `prefix_budget_bytes` bounds those that are kept to be shared, beside them; None keeps none. A
    scheduler that looked at nothing for `blind_after_s` holds that time against no request.
    """

    max_in_flight: int = 256
    # Fills the cores: 240 tokens/s in all, where 128 gave 66, and 20 to a request that came then,
    # where 128 left it 1 (2 groups on 2 cores; alone it had 100).
    max_batch_in_flight: int = 32
    kv_budget_bytes: int | None = 1 << 30
    prefix_budget_bytes: int | None = 256 << 20
    poll_s: float = 0.05
    coverage_check_s: float = 1.0
    confirm_timeout_s: float = 10.0
    settle_after_s: float = 0.0
    reply_retry_s: float = 1.0
    reply_patience_s: float = 60.0
    sweep_after_s: float = 20.0
    blind_after_s: float = 1.0
    max_counts_a_poll: int = 32
    redrive: RedriveLimits = RedriveLimits()
