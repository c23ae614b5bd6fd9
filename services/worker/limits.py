"""The bounds of one worker, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Rows are token positions. `park_…` is for steps that came before their predecessor."""

    max_batch_rows: int = 128
    max_batch_sequences: int = 64
    prefetch: int = 32
    kv_cache_bytes: int = 32 << 20
    confirm_timeout_s: float = 10.0
    park_retry_s: float = 0.005
    park_limit_s: float = 5.0
