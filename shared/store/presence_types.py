"""What workers and schedulers tell of themselves, as values with a JSON form. Knows no store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self

from shared.errors import DecodeError

# What a decode step waits for at one worker: on its way from the one before, until its turn comes,
# for its bytes to become a step, for the last look, the layers and the sampler, the store, and to
# become the bytes of the next. What follows is not on its way: the confirm, and the ack.
STAGES = (
    "broker", "queue", "decode", "prepare", "compute", "redis", "publish", "confirm", "settle",
)  # fmt: skip


class WorkerState(StrEnum):
    """What a worker is doing."""

    LOADING = "loading"  # reads its shards; takes no work yet
    SERVING = "serving"
    DRAINING = "draining"  # finishes what it has and leaves
    QUARANTINED = "quarantined"  # failed again and again; takes no work for a while


class _Presence:
    """JSON for flat dataclasses of int, str, WorkerState and tuple[int, ...]."""

    __slots__ = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Unknown keys are ignored, missing ones take their defaults.

        Raises `DecodeError` naming the key of a value of another type, or a missing key.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise DecodeError(f"a presence entry is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise DecodeError(f"a presence entry must be a map, got {type(raw).__name__}")
        known = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        values = {name: _checked(name, known[name], raw[name]) for name in raw if name in known}
        try:
            return cls(**values)
        except TypeError as error:
            raise DecodeError(f"a presence entry is incomplete: {error}") from error


def _checked(name: str, kind: Any, value: Any) -> Any:
    match kind:
        case "int" if type(value) is int:
            return value
        case "str" if type(value) is str:
            return value
        case "tuple[int, ...]" if type(value) is list and all(type(v) is int for v in value):
            return tuple(value)
        case "WorkerState" if type(value) is str and value in list(WorkerState):
            return WorkerState(value)
    raise DecodeError(f"presence {name} must be {kind}, got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class WorkerInfo(_Presence):
    """A worker as it last told of itself.

    `groups` is what it holds of the layout; the store fills it in from the claims. `memory_bytes`
    is its budget, 0 for none. `num_steps` counts the steps it has computed, `num_failures` those it
    could not; `num_pending` waited for their turn at the last heartbeat, and `num_active` requests
    had one lately; `turn_us` is how long a turn takes of late. `reason` says why it is in a state
    that is not its usual one. `stage_us` are sums over `num_decode_steps` steps in
    `num_decode_turns` batches, in the order of `STAGES`. `told_unix_ms` is when it told all that.
    `kv_cache_bytes` is what it has for the KV rows of sequences, 0 if it does not say.
    """

    worker_id: str
    groups: tuple[int, ...] = ()
    state: WorkerState = WorkerState.LOADING
    host: str = ""
    pid: int = 0
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    shard_bytes: int = 0
    memory_bytes: int = 0
    num_steps: int = 0
    last_step_unix_ms: int = 0
    started_unix_ms: int = 0
    num_pending: int = 0
    num_active: int = 0
    num_failures: int = 0
    turn_us: int = 0
    reason: str = ""
    num_decode_steps: int = 0
    num_decode_turns: int = 0
    stage_us: tuple[int, ...] = ()
    told_unix_ms: int = 0
    kv_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerInfo(_Presence):
    """A scheduler as it last told of itself.

    `num_requests` is how many it holds, `num_waiting` those of them that wait for room,
    `reserved_kv_bytes` what the others may write. `num_redrives` counts the lost steps that it
    sent again.
    """

    scheduler_id: str
    host: str = ""
    pid: int = 0
    rss_bytes: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    reserved_kv_bytes: int = 0
    num_redrives: int = 0
    started_unix_ms: int = 0
