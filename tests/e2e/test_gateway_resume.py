"""A stream that is cut goes on from its last event, with no token lost and none twice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.api_server import ApiServer, ServerEvent, read_events, texts_of
from tests.gguf_files import TinyModel, write_gguf

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "seed": 11,
    "n": 2,
    "max_tokens": 60,
    "ignore_eos": True,
}
NUM_CUTS = 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("resume")
    model = write_gguf(folder / "babbler.gguf", TinyModel(context=2048))
    settings = {"CELLPIPE_CACHE_DIR": str(folder / "cache")}
    with ApiServer(
        "serve", "--model", str(model), "--threads", "1", "--resume-grace", "60",
        settings=settings, log=folder / "server.log",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def expected(server: ApiServer) -> list[str]:
    _, whole, _ = server.call("POST", CHAT, BODY)
    return [choice["message"]["content"] for choice in whole["choices"]]


def test_a_stream_cut_at_any_byte_and_resumed_gives_the_exact_text(
    server: ApiServer, expected: list[str]
) -> None:
    rng = random.Random(1)
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    for _ in range(NUM_CUTS):
        events: list[ServerEvent] = []
        seen = server.stream(CHAT, body).read_some(rng.randrange(260, 8_000))
        events += read_events(seen)
        while not events or events[-1].document is not None:
            headers = {"last-event-id": events[-1].event_id} if events else {}
            seen = server.stream(CHAT, body, headers).read_some(rng.randrange(260, 40_000))
            events += read_events(seen)

        assert texts_of(events, 2) == expected
        usages = [e.document["usage"] for e in events if e.document and not e.document["choices"]]
        assert [usage["completion_tokens"] for usage in usages] == [120]
        assert len({event.event_id for event in events}) == len(events)


def test_every_event_can_be_the_last_that_was_seen(server: ApiServer, expected: list[str]) -> None:
    body = {**BODY, "stream": True, "stop": [expected[0][20:23]]}
    events = list(read_events(server.stream(CHAT, body).read()))
    whole = texts_of(events, 2)
    assert whole[0] == expected[0][: expected[0].index(expected[0][20:23])]

    for seen, event in enumerate(events[:-1], 1):
        rest = server.stream(CHAT, body, {"last-event-id": event.event_id}).read()
        texts = zip(texts_of(events[:seen], 2), texts_of(list(read_events(rest)), 2), strict=True)
        assert [before + after for before, after in texts] == whole


def test_an_answer_is_resumed_by_get_too(server: ApiServer, expected: list[str]) -> None:
    seen = server.stream(CHAT, {**BODY, "stream": True}).read_some(1_500)
    events = list(read_events(seen))
    name = events[-1].event_id.partition("/")[0]

    status, rest, headers = server.call(
        "GET", f"{CHAT}/{name}", headers={"last-event-id": events[-1].event_id}
    )

    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert texts_of([*events, *read_events(rest)], 2) == expected


def test_who_looks_on_and_hangs_up_cancels_nothing(server: ApiServer) -> None:
    body = {**BODY, "n": 1, "max_tokens": 1_500}
    _, whole, _ = server.call("POST", CHAT, body)
    stream = server.stream(CHAT, {**body, "stream": True})
    seen = stream.response.read(200)
    name = seen.decode().partition(": ")[2].partition("/")[0]
    for _ in range(3):
        connection = server.connect()
        connection.request("GET", f"{CHAT}/{name}")
        connection.close()

    events = list(read_events(seen + stream.read()))

    assert texts_of(events) == [whole["choices"][0]["message"]["content"]]


@pytest.mark.parametrize(
    ("event_id", "status"),
    [
        ("chatcmpl-0123456789abcdef01234567/3,4", 404),
        ("chatcmpl-0123456789abcdef01234567/x", 400),
        ("42", 400),
        ("chatcmpl-0123456789abcdef01234567/" + "9," * 3000, 400),
    ],
)
def test_an_event_id_that_is_not_ours_is_refused(
    server: ApiServer, event_id: str, status: int
) -> None:
    found, error, _ = server.call(
        "POST", CHAT, {**BODY, "stream": True}, {"last-event-id": event_id}
    )

    assert found == status
    assert error["error"]["message"]
