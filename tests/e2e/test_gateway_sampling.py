"""Log probabilities, bias and penalties as a user of OpenAI's client meets them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionTokenLogprob

from tests.api_server import ApiServer, entries_of, read_events, texts_of
from tests.gguf_files import TinyModel, write_gguf
from tests.spelling_model import END, byte_token, write_speller

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "say:😀中!"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED = {"messages": HELLO, "seed": 5, "max_tokens": 40, "ignore_eos": True, "logprobs": True,
         "top_logprobs": 2, "n": 2}  # fmt: skip


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Says `SAID` and ends; a byte is a token."""
    folder = tmp_path_factory.mktemp("speller")
    with _serve(folder, write_speller(folder / "speller.gguf", SAID)) as server:
        yield server


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Says whatever its seed makes it say; three groups."""
    folder = tmp_path_factory.mktemp("babbler")
    model = write_gguf(folder / "babbler.gguf", TinyModel(context=2048))
    with _serve(folder, model) as server:
        yield server


def _serve(folder: Path, model: Path, *options: str) -> ApiServer:
    settings = {"CELLPIPE_CACHE_DIR": str(folder / "cache")}
    return ApiServer(
        "serve", "--model", str(model), "--threads", "1", "--resume-grace", "60", *options,
        settings=settings, log=folder / "server.log",
    )  # fmt: skip


def bytes_of(tokens: list[ChatCompletionTokenLogprob]) -> bytes:
    return b"".join(bytes(token.bytes or ()) for token in tokens)


def test_a_chat_has_the_log_probabilities_of_what_it_says(speller: ApiServer) -> None:
    answer = speller.client().chat.completions.create(
        model="speller", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes_of(logprobs.content).decode() == SAID, "without the end-of-sequence token"
    assert [entry.token for entry in logprobs.content[:5]] == [*"say:", "bytes:\\xf0"]
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.token, entry.logprob) == (
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        )
        assert 0 < sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.000001


def test_a_stream_has_the_same_with_the_text_they_belong_to(speller: ApiServer) -> None:
    client = speller.client()
    whole = client.chat.completions.create(
        model="speller", messages=HELLO, temperature=0, logprobs=True, top_logprobs=1
    )
    stream = client.chat.completions.create(
        model="speller", messages=HELLO, temperature=0, logprobs=True, top_logprobs=1, stream=True
    )

    streamed = []
    for chunk in stream:
        choice = chunk.choices[0]
        found = choice.logprobs.content or [] if choice.logprobs else []
        assert bytes_of(found).decode() == (choice.delta.content or "")
        streamed += found

    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content


def test_without_alternatives_and_without_asking(speller: ApiServer) -> None:
    client = speller.client()

    alone = client.chat.completions.create(model="speller", messages=HELLO, logprobs=True)
    none = client.chat.completions.create(model="speller", messages=HELLO)

    assert alone.choices[0].logprobs is not None
    assert {len(entry.top_logprobs) for entry in alone.choices[0].logprobs.content or ()} <= {0}
    assert none.choices[0].logprobs is None


@pytest.mark.parametrize(("stop", "shown"), [("y:", "sa"), ("😀", "say:"), ("s", "")])
def test_what_a_stop_string_hides_has_none(speller: ApiServer, stop: str, shown: str) -> None:
    answer = speller.client().chat.completions.create(
        model="speller", messages=HELLO, temperature=0, logprobs=True, stop=stop
    )

    assert answer.choices[0].logprobs is not None
    assert bytes_of(answer.choices[0].logprobs.content or []).decode() == shown


def test_a_text_completion_has_them_in_its_own_shape(speller: ApiServer) -> None:
    client = speller.client()

    def ask(logprobs: int) -> Any:
        answer = client.completions.create(
            model="speller", prompt="x\n", temperature=0, max_tokens=6, logprobs=logprobs
        )
        assert answer.choices[0].text == "say:\ufffd"
        return answer.choices[0].logprobs

    two, zero = ask(2), ask(0)

    assert two.tokens == [*"say:", "bytes:\\xf0", "bytes:\\x9f"]
    assert two.text_offset == [0, 1, 2, 3, 4, 4]
    assert [len(top) for top in two.top_logprobs] == [2] * 6
    assert [top[t] for top, t in zip(two.top_logprobs, two.tokens, strict=True)] == (
        two.token_logprobs
    )
    assert zero.token_logprobs == two.token_logprobs
    assert zero.top_logprobs is None


def test_a_text_completion_streams_them(speller: ApiServer) -> None:
    body = {"prompt": "x\n", "temperature": 0, "max_tokens": 9, "logprobs": 1}
    _, whole, _ = speller.call("POST", TEXT, body)

    events = list(read_events(speller.stream(TEXT, {**body, "stream": True}).read()))

    parts = [e.document["choices"][0]["logprobs"] for e in events if e.document]
    joined = {
        name: [item for part in parts if part for item in part[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert joined == whole["choices"][0]["logprobs"]


def test_a_stream_resumed_after_any_event_loses_and_repeats_none(babbler: ApiServer) -> None:
    body = {**ASKED, "stream": True}
    _, whole, _ = babbler.call("POST", CHAT, ASKED)
    events = list(read_events(babbler.stream(CHAT, body).read()))
    for index, choice in enumerate(whole["choices"]):
        assert entries_of(events, index) == choice["logprobs"]["content"]

    for seen, event in enumerate(events[:-1], 1):
        rest = list(
            read_events(babbler.stream(CHAT, body, {"last-event-id": event.event_id}).read())
        )
        assert texts_of(events[:seen] + rest, 2) == texts_of(events, 2)
        for index in range(2):
            assert entries_of(events[:seen] + rest, index) == entries_of(events, index)


def test_an_answer_that_is_picked_up_has_them(babbler: ApiServer) -> None:
    body = {**ASKED, "store": True}
    _, whole, _ = babbler.call("POST", CHAT, body)

    _, picked_up, _ = babbler.call("GET", f"{CHAT}/{whole['id']}")

    assert picked_up == whole
    assert whole["choices"][0]["logprobs"]["content"]


def test_a_bias_forces_a_token_and_forbids_one(speller: ApiServer) -> None:
    client = speller.client()
    x, s = str(byte_token(ord("x"))), str(byte_token(ord("s")))

    forced = client.chat.completions.create(
        model="speller", messages=HELLO, max_tokens=5, logit_bias={x: 100}, logprobs=True
    )
    banned = client.chat.completions.create(
        model="speller", messages=HELLO, max_tokens=1, logit_bias={s: -100, str(END): -100}
    )

    assert forced.choices[0].message.content == "xxxxx"
    assert forced.choices[0].logprobs is not None
    assert all(entry.logprob < 0 for entry in forced.choices[0].logprobs.content or ())
    assert banned.choices[0].message.content != "s"


def test_penalties_make_an_answer_repeat_itself_less(babbler: ApiServer) -> None:
    def ask(**params: float) -> tuple[str, int]:
        body = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True, "temperature": 0,
                "logprobs": True, **params}  # fmt: skip
        status, answer, _ = babbler.call("POST", CHAT, body)
        assert status == 200, answer
        tokens = [entry["bytes"] for entry in answer["choices"][0]["logprobs"]["content"]]
        return answer["choices"][0]["message"]["content"], len(set(map(tuple, tokens)))

    plain, rewarded = ask(), ask(frequency_penalty=-2)
    others = [ask(frequency_penalty=2), ask(presence_penalty=2), ask(repetition_penalty=1.5)]

    assert ask(frequency_penalty=0, presence_penalty=0, repetition_penalty=1, min_p=0) == plain
    assert all(other[1] > rewarded[1] for other in others)
    assert ask(frequency_penalty=2) == others[0]


def test_min_p_of_one_is_greedy(babbler: ApiServer) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "seed": 3}

    texts = [
        babbler.call("POST", CHAT, {**body, **params})[1]["choices"][0]["message"]["content"]
        for params in ({"temperature": 0}, {"temperature": 2, "min_p": 1}, {"temperature": 2})
    ]

    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("param", "params", "words"),
    [
        ("frequency_penalty", {"frequency_penalty": 2.5}, "got 2.5"),
        ("presence_penalty", {"presence_penalty": -3}, "got -3"),
        ("repetition_penalty", {"repetition_penalty": 0}, "got 0"),
        ("min_p", {"min_p": 1.5}, "got 1.5"),
        ("min_p", {"min_p": "1"}, "min_p"),
        ("logit_bias", {"logit_bias": {"5": 101}}, "of token 5 .* got 101"),
        ("logit_bias", {"logit_bias": {"five": 1}}, "got 'five'"),
        ("logit_bias", {"logit_bias": {"999999": 1}}, "token 999999"),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(301)}}, "at most 300 .* got 301"),
        ("logit_bias", {"logit_bias": [1]}, "map of token ids"),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "got 21"),
        ("top_logprobs", {"top_logprobs": 2}, "logprobs: true"),
        ("logprobs", {"logprobs": 2}, "logprobs"),
        (
            "logprobs",
            {"logprobs": True, "top_logprobs": 20, "n": 32, "max_tokens": 600},
            "may have 19200 tokens",
        ),
    ],
)
def test_what_is_out_of_range_is_named(
    babbler: ApiServer, param: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        babbler.client().chat.completions.create(model="babbler", messages=HELLO, extra_body=params)

    assert (refused.value.param, refused.value.code) == (param, "invalid_value")


@pytest.mark.parametrize("logprobs", [6, -1, True])
def test_a_text_completion_has_at_most_five(speller: ApiServer, logprobs: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        speller.client().completions.create(model="speller", prompt="x", logprobs=logprobs)

    assert refused.value.param == "logprobs"
