"""How a model is cut and what its queues are called. Knows no connection and no message body.

Queue names carry a schema version, because a queue's arguments cannot be changed once it exists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import ConfigError, ModelError
from shared.manifest import Manifest

QUEUE_SCHEMA = "v2"
REQUESTS_QUEUE = f"cellpipe.{QUEUE_SCHEMA}.requests"
BATCH_QUEUE = f"{REQUESTS_QUEUE}.batch"
DEAD_QUEUE = f"cellpipe.{QUEUE_SCHEMA}.dead"
MAX_QUEUED_REQUESTS = 10_000
NO_DELIVERY_LIMIT = 1_000_000
MAX_QUEUED_REQUEST_BYTES = 256 << 20  # one may have 8 MiB
LOAD_AGAIN = "load the model again: cellpipe load MODEL --groups N"
# How long a step waits for the worker it was meant for before any worker of its group may take it.
# Recovery after SIGKILL, 3 groups x 2 workers on 2 cores, p50 / p99: 1.2 / 2.4 s at 1,000 and
# 0.5 / 0.7 s at 500.
INBOX_TTL_MS = 500
INBOX_EXPIRES_MS = 60_000  # after its worker has gone

# What a worker's process takes beside its shards and KV rows: interpreter, NumPy, clients, buffers.
# Measured: 75 MB at its peak with 10 layers of SmolLM2-135M.
WORKER_BASE_BYTES = 90_000_000


class QueueType(StrEnum):
    """RabbitMQ's `x-queue-type`, always sent."""

    CLASSIC = "classic"
    QUORUM = "quorum"


class Wire(StrEnum):
    """How hidden states travel between layer groups; `shared.wire` says what each does to them."""

    F32 = "f32"
    F16 = "f16"
    I8 = "i8"


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A durable queue. `max_length` messages or `max_bytes` bound it with reject-publish;
    `dead_letter_queue` takes what is rejected without requeue, and what waits undelivered for
    longer than `message_ttl_ms`. A queue that has had no consumer for `expires_ms` is deleted."""

    name: str
    queue_type: QueueType = QueueType.CLASSIC
    max_length: int | None = None
    max_bytes: int | None = None
    dead_letter_queue: str | None = None
    delivery_limit: int | None = None
    message_ttl_ms: int | None = None
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The cut of a model into layer groups.

    Group i runs layers `bounds[i][0]` up to, not including, `bounds[i][1]`. All its step queues are
    of one `queue_type`, which is part of the `layout_id` and so of their names: a queue's type
    cannot be changed, and whoever serves a layout agrees on it. So is the `wire`: one other than
    f32 rounds hidden states at every hop, so queues and KV rows of two wires must never mix.
    """

    layout_id: str
    model_id: str
    bounds: tuple[tuple[int, int], ...]
    queue_type: QueueType = QueueType.CLASSIC
    wire: Wire = Wire.F32

    @property
    def num_groups(self) -> int:
        return len(self.bounds)

    @property
    def last_group(self) -> int:
        return len(self.bounds) - 1

    def num_layers(self, group: int) -> int:
        first, end = self.bounds[group]
        return end - first

    def to_json(self) -> str:
        return json.dumps(
            {
                "layout_id": self.layout_id,
                "model_id": self.model_id,
                "bounds": self.bounds,
                "queue_type": self.queue_type,
                "wire": self.wire,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Parse what `to_json` wrote. Raises `ModelError` for anything else."""
        try:
            raw = json.loads(text)
            bounds = tuple((int(first), int(end)) for first, end in raw["bounds"])
            queue_type = QueueType(raw.get("queue_type", QueueType.CLASSIC))
            wire = Wire(raw.get("wire", Wire.F32))
            layout = cls(str(raw["layout_id"]), str(raw["model_id"]), bounds, queue_type, wire)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the layout cannot be read: {error}", remedy=LOAD_AGAIN) from error
        ends = [0, *(end for _, end in bounds)]
        if not bounds or any(
            first != ends[group] or end <= first for group, (first, end) in enumerate(bounds)
        ):
            raise ModelError(
                f"layout {layout.layout_id!r:.80} leaves out layers, or holds some twice",
                remedy=LOAD_AGAIN,
            )
        return layout


def even_layout(
    model_id: str,
    num_hidden_layers: int,
    num_groups: int,
    queue_type: QueueType = QueueType.CLASSIC,
    wire: Wire = Wire.F32,
) -> Layout:
    """Cut the layers into `num_groups` runs whose lengths differ by at most one, longer ones first.

    Raises `ConfigError` unless 1 <= num_groups <= num_hidden_layers.
    """
    if not 1 <= num_groups <= num_hidden_layers:
        raise ConfigError(
            f"--groups must be in 1..{num_hidden_layers} (the model's layers), got {num_groups}"
        )
    size, extra = divmod(num_hidden_layers, num_groups)
    bounds: list[tuple[int, int]] = []
    first = 0
    for group in range(num_groups):
        end = first + size + (group < extra)
        bounds.append((first, end))
        first = end
    suffix = "" if queue_type is QueueType.CLASSIC else f"-{queue_type}"
    suffix += "" if wire is Wire.F32 else f"-{wire}"
    return Layout(f"even{num_groups}{suffix}", model_id, tuple(bounds), queue_type, wire)


def check_layout(layout: Layout, manifest: Manifest) -> None:
    """Raise `ModelError` unless the groups are exactly the model's layers."""
    num_layers = manifest.config["num_hidden_layers"]
    if layout.model_id != manifest.model_id or layout.bounds[-1][1] != num_layers:
        raise ModelError(
            f"layout {layout.layout_id!r:.80} is not one of model {manifest.model_id} with its "
            f"{num_layers} layers",
            remedy=LOAD_AGAIN,
        )


def group_shards(layout: Layout, group: int, *, tied: bool) -> tuple[str, ...]:
    """Names of the shards that a worker needs for a group, in the order of the forward pass.

    `tied` says that the head uses the embedding (`tie_word_embeddings`).
    """
    first, end = layout.bounds[group]
    names = ["embedding"] if group == 0 else []
    names += ["rope", *(f"layer.{index}" for index in range(first, end))]
    if group == layout.last_group:
        names += ["embedding"] if tied and group != 0 else []
        names.append("head")
    return tuple(names)


def group_queue(model_id: str, layout_id: str, group: int) -> str:
    """Name of the queue that every worker of a layer group shares."""
    return f"cellpipe.{QUEUE_SCHEMA}.{model_id}.{layout_id}.g{group}"


def inbox_queue(worker_id: str, group: int) -> str:
    """Name of the queue of the steps of a layer group that are meant for one worker."""
    return f"cellpipe.{QUEUE_SCHEMA}.inbox.{worker_id}.g{group}"


def is_inbox(queue: str) -> bool:
    """Whether a queue is meant for one worker."""
    return queue.startswith(f"cellpipe.{QUEUE_SCHEMA}.inbox.")


def inbox_owner(queue: str) -> str:
    """The worker that an inbox is for; "" for any other queue."""
    if not is_inbox(queue):
        return ""
    return queue.removeprefix(inbox_queue("", 0)[: -len(".g0")]).rpartition(".g")[0]


def inbox_spec(
    layout: Layout, worker_id: str, group: int, *, ttl_ms: int = INBOX_TTL_MS
) -> QueueSpec:
    """A worker's inbox for a group. What it does not take in time, the group's queue gets."""
    return QueueSpec(
        inbox_queue(worker_id, group),
        layout.queue_type,
        delivery_limit=_delivery_limit(layout.queue_type),
        dead_letter_queue=group_queue(layout.model_id, layout.layout_id, group),
        message_ttl_ms=ttl_ms,
        expires_ms=INBOX_EXPIRES_MS,
    )


def control_queues() -> tuple[QueueSpec, ...]:
    """The queues that exist once per cluster."""
    return (
        _requests_spec(REQUESTS_QUEUE),
        _requests_spec(BATCH_QUEUE),  # served when nothing waits in the first
        # Last, for the last declaration alone may be gone if RabbitMQ is killed just then (Mnesia).
        QueueSpec(DEAD_QUEUE, QueueType.CLASSIC),
    )


def _requests_spec(name: str) -> QueueSpec:
    """Quorum: an accepted request must survive a broker. A scheduler's restart redelivers what it
    held, and 4.x dead-letters after 20 redeliveries unless told otherwise."""
    return QueueSpec(
        name,
        QueueType.QUORUM,
        max_length=MAX_QUEUED_REQUESTS,
        max_bytes=MAX_QUEUED_REQUEST_BYTES,
        dead_letter_queue=DEAD_QUEUE,
        delivery_limit=NO_DELIVERY_LIMIT,
    )


def _delivery_limit(queue_type: QueueType) -> int | None:
    """Attempts are counted by workers; a quorum queue of 4.x would end a step after 20 of its own.

    Classic queues know no such limit.
    """
    return NO_DELIVERY_LIMIT if queue_type is QueueType.QUORUM else None


def group_queues(layout: Layout) -> tuple[QueueSpec, ...]:
    """The step queues of a layout. Never bounded: a bounded decode cycle can deadlock."""
    return tuple(
        QueueSpec(
            group_queue(layout.model_id, layout.layout_id, group),
            layout.queue_type,
            dead_letter_queue=DEAD_QUEUE,
            delivery_limit=_delivery_limit(layout.queue_type),
        )
        for group in range(layout.num_groups)
    )


def group_bytes(manifest: Manifest, layout: Layout, group: int) -> int:
    """Bytes of weights that a worker holds to serve a layer group."""
    tied = bool(manifest.config["tie_word_embeddings"])
    return sum(manifest.shard(name).num_bytes for name in group_shards(layout, group, tied=tied))
