"""The names of every key in Redis. Knows no connection and no value.

The prefix carries a schema version: a process of another schema never reads these keys. What must
be changed together shares a hash tag, the part in braces, so that a Redis Cluster keeps it in one
slot: all keys of a request, and presence and claims of one layout. Segments of shards have no tag
and spread over a cluster.
"""

from __future__ import annotations

PREFIX = "cellpipe:v1:"

MODELS = f"{PREFIX}models"  # set of model ids
ACTIVE_MODEL = f"{PREFIX}active_model"  # the model that was activated last
SCHEDULERS = f"{PREFIX}{{schedulers}}:ids"  # set of scheduler ids


def ledger(request_id: str) -> str:
    """Hash: the record of a request."""
    return f"{PREFIX}{{{request_id}}}:ledger"


def events(request_id: str) -> str:
    """Stream: the tokens of a request and its end."""
    return f"{PREFIX}{{{request_id}}}:events"


def completion(completion_id: str) -> str:
    """String: what a gateway remembers of an answer that may be picked up again."""
    return f"{PREFIX}completion:{completion_id}"


def completion_reader(completion_id: str) -> str:
    """String: who follows that answer now."""
    return f"{PREFIX}completion_reader:{completion_id}"


def kv_page(request_id: str, layout_id: str, group: int, page: int) -> str:
    """String: up to 16 rows of keys and values."""
    return f"{PREFIX}{{{request_id}}}:kv:{layout_id}:{group}:{page}"


def kv_shared(request_id: str, layout_id: str) -> str:
    """String: digests of the pages that stand for a request's first ones, 32 bytes each."""
    return f"{PREFIX}{{{request_id}}}:kv:{layout_id}:shared"


def prefix_page(layout_id: str, group: int, digest: bytes) -> str:
    """String: 16 rows of keys and values, of whatever request begins with these tokens."""
    return f"{PREFIX}prefix:{layout_id}:{group}:{digest.hex()}"


def prefix_uses(model_id: str, layout_id: str) -> str:
    """Sorted set: digests of shared pages by when they were last used, in microseconds."""
    return f"{PREFIX}prefix_uses:{model_id}:{layout_id}"


def attempts(request_id: str, layout_id: str, group: int, position: int) -> str:
    """Hash: worker id -> when it began to compute a step that was delivered before."""
    return f"{PREFIX}{{{request_id}}}:attempts:{layout_id}:{group}:{position}"


def draining(model_id: str, layout_id: str, worker_id: str) -> str:
    """String with a time to live: the worker is asked to drain."""
    return f"{PREFIX}{{{model_id}/{layout_id}}}:drain:{worker_id}"


def manifest(model_id: str) -> str:
    """String: the manifest as JSON."""
    return f"{PREFIX}model:{model_id}:manifest"


def layouts(model_id: str) -> str:
    """Hash: layout id -> layout as JSON."""
    return f"{PREFIX}model:{model_id}:layouts"


def active_layout(model_id: str) -> str:
    """String: the id of the layout that workers serve."""
    return f"{PREFIX}model:{model_id}:active_layout"


def segment(model_id: str, shard_name: str, index: int) -> str:
    """String: one piece of a shard."""
    return f"{PREFIX}segment:{model_id}:{shard_name}:{index}"


def claims(model_id: str, layout_id: str) -> str:
    """Hash: worker id -> the groups it claims, "0,3"."""
    return f"{PREFIX}{{{model_id}/{layout_id}}}:claims"


def worker(model_id: str, layout_id: str, worker_id: str) -> str:
    """String with a time to live: a worker's presence as JSON."""
    return f"{PREFIX}{{{model_id}/{layout_id}}}:worker:{worker_id}"


def scheduler(scheduler_id: str) -> str:
    """String with a time to live: a scheduler's presence as JSON."""
    return f"{PREFIX}{{schedulers}}:scheduler:{scheduler_id}"


def request_id_of(key: str) -> str:
    """The id of the request that a key belongs to; "" when it belongs to none."""
    tag, closed, _ = key.removeprefix(f"{PREFIX}{{").partition("}")
    return tag if closed and key.startswith(f"{PREFIX}{{") and "/" not in tag else ""


def is_kv_page(key: str) -> bool:
    """Whether a key of a request is one of its KV pages."""
    return "}:kv:" in key
