"""Forms and calls of a cluster's API, over gateways and workers that are killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.api_server import ApiServer, read_events, texts_of
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 90},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "seed": 5,
    "max_tokens": 900,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
}
TOOLS = [{"type": "function", "function": {"name": "keep", "parameters": SCHEMA}}]


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[ProcessCluster]:
    """Two groups, the last one of two workers, which come last, and a tiny model."""
    model = write_gguf(tmp_path / "babbler.gguf", TinyModel(context=2048))
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path / "cache")
        cluster.load(model, groups=2)
        cluster.start("scheduler")
        for group in (0, 1, 1):
            cluster.start("worker", "--group", str(group))
        cluster.wait_until_serving(3)
        yield cluster


def test_a_form_is_kept_over_killed_gateways_and_workers(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    with ApiServer("gateway", settings=cluster.settings, log=tmp_path / "first.txt") as server:
        _, whole, _ = server.call("POST", CHAT, BODY)
        stream = server.stream(CHAT, {**BODY, "stream": True})
        events = list(read_events(stream.read_some(3_000)))
        server.kill()
    cluster.processes[-1].kill()
    log = tmp_path / "second.txt"
    with ApiServer("gateway", settings=cluster.settings, log=log) as server:
        headers = {"last-event-id": events[-1].event_id}
        events += read_events(server.stream(CHAT, {**BODY, "stream": True}, headers).read())
        ask = {k: v for k, v in BODY.items() if k != "response_format"}
        called = server.client().chat.completions.create(
            model="", **ask, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )

    [choice] = whole["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert texts_of(events) == [choice["message"]["content"]]
    [call] = called.choices[0].message.tool_calls
    assert call.function.name == "keep"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
