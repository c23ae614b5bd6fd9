"""The HTTP API as a user of OpenAI's client meets it: a real process, a model that says a text."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api_server import ApiServer, read_events, texts_of
from tests.gguf_files import TinyModel, write_gguf
from tests.spelling_model import write_speller

TEXT = "say:😀中好e\u0301!"  # an emoji, Chinese, a combining character; no byte twice
HELLO: list[dict[str, str]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Says `TEXT` and ends."""
    folder = tmp_path_factory.mktemp("speller")
    model = write_speller(folder / "speller.gguf", TEXT)
    with _serve(folder, model) as server:
        yield server


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Says whatever its seed makes it say."""
    folder = tmp_path_factory.mktemp("babbler")
    model = write_gguf(folder / "babbler.gguf", TinyModel(context=2048))
    with _serve(folder, model) as server:
        yield server


def _serve(folder: Path, model: Path, *options: str) -> ApiServer:
    settings = {"CELLPIPE_CACHE_DIR": str(folder / "cache")}
    return ApiServer(
        "serve", "--model", str(model), "--threads", "1", *options,
        settings=settings, log=folder / "server.log",
    )  # fmt: skip


def test_chat_answers_with_text_and_exact_usage(speller: ApiServer) -> None:
    answer = speller.client().chat.completions.create(
        model="speller", messages=HELLO, temperature=0, stop=None
    )

    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1, "a byte a token, and the end"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(TEXT.encode()) + 1
    assert answer.model == "speller"


def test_a_stream_has_whole_characters_and_usage(speller: ApiServer) -> None:
    chunks = list(
        speller.client().chat.completions.create(
            model="speller",
            messages=HELLO,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [("😀中", "say:"), (["zzz", "y:"], "sa"), ("好e\u0301", "say:😀中"), ("!x", TEXT), ("s", "")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_that_span_tokens_are_honoured_and_not_shown(
    speller: ApiServer, stop: str | list[str], text: str, stream: bool
) -> None:
    body = {"messages": HELLO, "temperature": 0, "stop": stop, "stream": stream}

    if stream:
        events = list(read_events(speller.stream("/v1/chat/completions", body).read()))
        found = texts_of(events)[0]
        reasons = [e.document["choices"][0]["finish_reason"] for e in events if e.document]
        assert reasons[-1] == "stop"
    else:
        _, answer, _ = speller.call("POST", "/v1/chat/completions", body)
        found = answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        stops = [stop] if isinstance(stop, str) else stop
        shown = min((text + s for s in stops if text + s in TEXT), default=TEXT + "x", key=len)
        assert answer["usage"]["completion_tokens"] == len(shown.encode())

    assert found == text


def test_max_tokens_of_one_is_one_token(speller: ApiServer) -> None:
    answer = speller.client().chat.completions.create(
        model="speller", messages=HELLO, temperature=0, max_tokens=1
    )

    assert answer.choices[0].message.content == "s"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_an_answer_that_ends_inside_a_character_says_so_once(speller: ApiServer) -> None:
    cut = len(b"say:") + 2
    body = {"messages": HELLO, "temperature": 0, "max_tokens": cut, "stream": True}

    events = list(read_events(speller.stream("/v1/chat/completions", body).read()))

    assert texts_of(events) == ["say:\ufffd"]


def test_text_completion_of_an_empty_prompt_and_of_several(speller: ApiServer) -> None:
    client = speller.client()

    empty = client.completions.create(model="speller", prompt="", max_tokens=3)
    several = client.completions.create(model="speller", prompt=["x\n", [5, 6]], max_tokens=4, n=2)

    assert empty.usage is not None
    assert empty.usage.completion_tokens <= 3
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None
    assert several.usage.prompt_tokens == 4


def test_two_choices_with_a_seed_are_two_and_repeatable(babbler: ApiServer) -> None:
    def ask(seed: int, n: int) -> list[str | None]:
        answer = babbler.client().chat.completions.create(
            model="babbler", messages=HELLO, temperature=1.0, seed=seed, n=n, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = ask(7, 2)

    assert first[0] != first[1]
    assert ask(7, 2) == first
    assert ask(8, 1) == first[1:]


def test_a_stream_of_two_choices_equals_the_whole_answer(babbler: ApiServer) -> None:
    body = {"messages": HELLO, "seed": 3, "n": 2, "max_tokens": 40}
    _, whole, _ = babbler.call("POST", "/v1/chat/completions", body)

    response = babbler.stream("/v1/chat/completions", {**body, "stream": True})
    events = list(read_events(response.read()))

    assert texts_of(events, 2) == [c["message"]["content"] for c in whole["choices"]]
    assert all(event.event_id for event in events)
    assert len({event.event_id for event in events}) == len(events)


def test_a_choice_that_a_stop_string_ends_is_logged_as_its_client_sees_it(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "babbler.gguf", TinyModel(context=2048))
    body = {"messages": HELLO, "seed": 3, "n": 2, "max_tokens": 1000}
    with _serve(tmp_path, model) as server:
        _, whole, _ = server.call("POST", "/v1/chat/completions", {**body, "max_tokens": 40})
        stop = whole["choices"][0]["message"]["content"][8:11]
        _, answer, _ = server.call("POST", "/v1/chat/completions", {**body, "stop": [stop]})
        deadline_s = time.monotonic() + 30
        while len(reasons := logged_reasons(server.log, answer["id"])) < 2:
            assert time.monotonic() < deadline_s, server.log.read_text()
            time.sleep(0.02)

    seen = [choice["finish_reason"] for choice in answer["choices"]]
    assert seen[0] == "stop"
    assert sorted(reasons) == sorted(seen)


def logged_reasons(log: Path, completion_id: str) -> list[str]:
    """Of the ends of a completion's requests."""
    ends = [line for line in log.read_text().splitlines() if "request_done" in line]
    number = completion_id.partition("-")[2]
    return [re.findall(r"finish_reason=(\w+)", line)[0] for line in ends if number in line]


def test_cached_tokens_are_counted(babbler: ApiServer) -> None:
    long = [{"role": "user", "content": "a long and winding beginning, the same for all" * 4}]
    client = babbler.client()

    usages = [
        client.chat.completions.create(model="babbler", messages=long, max_tokens=1).usage
        for _ in range(2)
    ]

    assert usages[1] is not None
    assert usages[1].prompt_tokens_details is not None
    cached = usages[1].prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 < cached < usages[1].prompt_tokens


def test_models_are_listed(speller: ApiServer) -> None:
    client = speller.client()

    assert [model.id for model in client.models.list()] == ["speller"]
    assert client.models.retrieve("speller").id == "speller"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_errors_are_those_of_openais_client(speller: ApiServer) -> None:
    client = speller.client()

    with pytest.raises(openai.NotFoundError, match="gpt-5") as missing:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="speller", messages=HELLO, service_tier="flex")
    assert (refused.value.param, refused.value.code) == ("service_tier", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="speller", messages=HELLO, extra_body={"mirostat": 2})
    assert (unknown.value.param, unknown.value.code) == ("mirostat", "unknown_parameter")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="speller", messages=HELLO, max_tokens=5000)
    assert (long.value.param, long.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.InternalServerError) as embeddings:
        client.embeddings.create(model="speller", input="x")
    assert embeddings.value.status_code == 501
    assert embeddings.value.response.headers["x-should-retry"] == "false"
    assert missing.value.request_id is not None
    assert missing.value.request_id.startswith("req-")


def test_tokens_go_there_and_back(speller: ApiServer) -> None:
    _, tokens, _ = speller.call("POST", "/tokenize", {"content": "hello 😀"})
    _, text, _ = speller.call("POST", "/detokenize", {"tokens": tokens["tokens"]})

    assert text["content"] == "hello 😀"
    assert tokens["count"] == len(tokens["tokens"])


def test_a_hang_up_cancels_and_store_does_not(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "babbler.gguf", TinyModel(context=16_384))
    with _serve(tmp_path, model, "--resume-grace", "0") as server:
        body = {"messages": HELLO, "seed": 1, "ignore_eos": True, "stream": True}
        cut_id = _hang_up(server, {**body, "max_tokens": 16_000})
        stored_id = _hang_up(server, {**body, "max_tokens": 400, "store": True})

        status, cut, _ = server.call("GET", f"/v1/chat/completions/{cut_id}")
        _, stored, _ = server.call("GET", f"/v1/chat/completions/{stored_id}")
        _, whole, _ = server.call(
            "POST", "/v1/chat/completions", {**body, "max_tokens": 400, "stream": False}
        )

    assert (status, cut["error"]["code"]) == (410, "cancelled")
    assert stored["choices"] == whole["choices"]
    assert stored["usage"]["completion_tokens"] == 400


def _hang_up(server: ApiServer, body: dict[str, Any]) -> str:
    """Read the beginning of a stream; returns the answer's id."""
    first = server.stream("/v1/chat/completions", body).read_some(200).decode()
    return first.partition(": ")[2].partition("/")[0]
