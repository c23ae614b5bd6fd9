"""The bounds of one worker, as values."""

from __future__ import annotations

from dataclasses import dataclass

from shared.topology import INBOX_TTL_MS

MIN_KV_CACHE_BYTES = 4 << 20
# Of 49,152 tokens: 20 MB with the first form, 28 MB after 25 forms were asked for.
GRAMMAR_BYTES = 40_000_000


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Rows are token positions. `park_…` is for steps that came before their predecessor.

    `token_prefetch` is that of what a worker of group 0 is meant to have, token ids: as many as a
    batch holds, for half of them may stand for steps that stay here.
    `kv_cache_bytes` is cut to what a process' memory has beside its weights.
    A step whose computation ended its process `max_attempts` times is buried. `inbox_ttl_ms` is how
    long a step waits for the worker it is meant for; a layout's workers must agree on it.
    `keeps_steps` lets what follows from a step stay in the worker where it can (see `stays.py`).
    """

    max_batch_rows: int = 128
    max_batch_sequences: int = 64
    prefetch: int = 32
    token_prefetch: int = 64
    kv_cache_bytes: int = 1 << 30
    confirm_timeout_s: float = 10.0
    park_retry_s: float = 0.005
    park_limit_s: float = 5.0
    max_attempts: int = 3
    inbox_ttl_ms: int = INBOX_TTL_MS
    keeps_steps: bool = True
