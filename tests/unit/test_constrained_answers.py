"""Answers with a form have it, wherever their tokens were drawn and whatever happens on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from services.scheduler.admission import first_step
from services.worker.limits import MIN_KV_CACHE_BYTES
from services.worker.shaping import processors_of, processors_with
from shared import codec
from shared.errors import ErrorCode, RequestError, ShardError, StoreUnavailable
from shared.messages import FinishReason, Request, SamplingParams, Step
from shared.text.constraint import Grammars
from shared.text.response_format import (
    ResponseFormat,
    calls_format,
    read_function,
    read_response_format,
)
from shared.text.token_bytes import TokenTable
from tests.faults import CALLS, Crash, LosableBroker, LossyBroker, Tripwire
from tests.rig import Rig
from tests.rig_model import GREEDY, SAMPLED, prompt_of, rig_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
ENDING: dict[str, Any] = {"ignore_eos": False, "max_tokens": 190, "speculation": True}
ASKED: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
    "greedy": (prompt_of(7) * 4, replace(GREEDY, **ENDING)),
    "sampled": (prompt_of(5, salt=3) * 5, replace(SAMPLED, **ENDING)),
    "hot": (prompt_of(9), replace(SAMPLED, **ENDING, top_k=0, top_p=1.0, frequency_penalty=0.5)),
}


def json_format(schema: Any = SCHEMA) -> ResponseFormat:
    wanted = read_response_format({"type": "json_schema", "json_schema": {"schema": schema}})
    assert wanted is not None
    return wanted


def call_format() -> ResponseFormat:
    functions = [read_function("weather", WEATHER, "f"), read_function("stop", None, "f")]
    return calls_format(functions, parallel=False)


def submit(rig: Rig, wanted: ResponseFormat | None = None, **sampling: Any) -> None:
    for request_id, (prompt, params) in ASKED.items():
        rig.submit(
            Request(
                request_id,
                token_ids=prompt,
                sampling=replace(params, **sampling),
                response_format=wanted or json_format(),
            )
        )


def answers(rig: Rig) -> dict[str, list[int]]:
    """The tokens of all, which have ended once each."""
    rig.run_until_quiet()
    assert rig.num_dead() == 0
    for request_id in ASKED:
        assert [e.finish_reason for e in rig.final_events(request_id)] == [FinishReason.STOP]
    return {request_id: rig.tokens(request_id) for request_id in ASKED}


def text_of(token_ids: list[int]) -> str:
    return rig_tokenizer().decode(token_ids)


def ask(num_groups: int, per_group: int = 1, **options: Any) -> dict[str, list[int]]:
    sampling = {k: options.pop(k) for k in ("speculation",) if k in options}
    rig = Rig(num_groups, **options)
    rig.add_workers(per_group)
    rig.add_scheduler()
    submit(rig, **sampling)
    return answers(rig)


@cache
def expected() -> Mapping[str, list[int]]:
    """Of one group that guesses nothing."""
    return ask(1, embedded=True, speculation=False)


def test_answers_validate_greedy_and_sampled() -> None:
    for token_ids in expected().values():
        jsonschema.validate(json.loads(text_of(token_ids)), SCHEMA)
    assert len({tuple(token_ids) for token_ids in expected().values()}) == len(ASKED)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("how", ["embedded", "one worker", "two workers"])
def test_the_tokens_are_the_same_in_every_cut(how: str, speculation: bool, num_groups: int) -> None:
    per_group = 2 if how == "two workers" else 1

    found = ask(num_groups, per_group, embedded=how == "embedded", speculation=speculation)

    assert found == expected()


def test_a_draft_that_breaks_the_form_is_not_accepted_and_others_are() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    line = LossyBroker(rig.new_broker(), only_if=lambda m: isinstance(codec.decode(m.body), Step))
    rig.add_worker(1, broker=line)
    rig.add_scheduler()
    words = {"enum": ["abc abc abc abc abc abc abc abc abc abc abc"]}
    prompt, params = ASKED["greedy"]
    rig.submit(Request("r", token_ids=prompt, sampling=params, response_format=json_format(words)))

    rig.run_until_quiet()

    assert json.loads(text_of(rig.tokens("r"))) == words["enum"][0]
    steps = [codec.decode(message.body) for message in line.seen]
    drafted = sum(len(step.draft) for step in steps if isinstance(step, Step))
    accepted = sum(len(step.accepted) for step in steps if isinstance(step, Step))
    assert 0 < accepted < drafted


CRASHES = [(Crash, call) for call in CALLS if call[0] == 1]
FAILURES = [(StoreUnavailable("gone"), call) for _, call in CRASHES if call[2] != "ack"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", [1, 6])
@pytest.mark.parametrize(("error", "call"), CRASHES + FAILURES)
def test_what_fails_in_the_last_group_changes_no_token(
    error: Any, call: tuple[int, str, str], nth: int, after: bool
) -> None:
    _, part, method = call
    rig = Rig(2)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    wire = Tripwire(inner[part], method, error, after=after, nth=nth)
    rig.add_worker(1, **{part: wire})
    rig.add_workers()
    rig.add_scheduler()

    submit(rig)

    assert answers(rig) == expected()
    assert wire.has_fired


def test_a_worker_that_takes_over_goes_on_within_the_form() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    first = rig.add_worker(1)
    rig.add_scheduler()
    submit(rig)
    rig.run_until(lambda: len(rig.tokens("greedy")) > 9)

    rig.kill(first)
    rig.add_worker(1)

    assert answers(rig) == expected()


def test_forced_calls_are_calls() -> None:
    rig = Rig(1)
    rig.add_workers()
    rig.add_scheduler()

    submit(rig, call_format())

    for token_ids in answers(rig).values():
        text = text_of(token_ids)
        assert text.startswith("<tool_call>\n")
        assert text.endswith("\n</tool_call>")
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        jsonschema.validate(call["arguments"], WEATHER if call["name"] == "weather" else {})


def test_max_tokens_cuts_what_is_not_complete() -> None:
    rig = Rig(1)
    rig.add_workers()
    rig.add_scheduler()

    submit(rig, max_tokens=5)
    rig.run_until_quiet()

    for request_id in ASKED:
        assert rig.record(request_id).finish_reason is FinishReason.LENGTH
        assert text_of(rig.tokens(request_id)).startswith("{")


def test_a_form_that_cannot_be_kept_ends_its_request_alone() -> None:
    # As if a worker that knows no forms had drawn a token.
    rig = Rig(1)
    rig.add_workers()
    rig.add_scheduler()
    prompt, params = ASKED["hot"]
    plan = rig.admit("bad", prompt, params, response_format=json_format())
    outside = [5]
    rig.ledger.commit("bad", 0, len(prompt), outside)
    rig.publish_step(first_step(plan, rig.layout, epoch=0, generated=outside))
    submit(rig)

    assert answers(rig) == expected()

    [end] = rig.final_events("bad")
    assert end.finish_reason is FinishReason.ERROR
    assert "the format" in end.error
    assert not rig.record("bad").num_generated > 1


def test_a_vocabulary_that_is_damaged_ends_what_needs_it_alone() -> None:
    def read_table() -> TokenTable:
        raise ShardError("shard tokenizer is short")

    rig = Rig(1)
    rig.add_worker(0, make_processors=processors_with(Grammars(read_table, [2])))
    rig.add_scheduler()
    prompt, params = ASKED["greedy"]
    submit(rig)
    rig.submit(Request("plain", token_ids=prompt, sampling=params))

    rig.run_until_quiet()

    assert rig.record("plain").finish_reason is not FinishReason.ERROR
    for request_id in ASKED:
        assert rig.record(request_id).error == "shard tokenizer is short"
        assert rig.record(request_id).error_code == ErrorCode.FAILED
    assert rig.num_crashes == 0


def test_what_grammars_need_is_taken_from_the_rows() -> None:
    rig = Rig(1)
    prompt, params = ASKED["greedy"]
    plan = rig.admit("r", prompt, params)
    row_bytes = rig.layer_group(0).new_cache().row_bytes
    limits = replace(rig.limits, kv_cache_bytes=MIN_KV_CACHE_BYTES + 64 * row_bytes)
    worker = rig.add_worker(0, limits=limits)
    rig.add_scheduler()
    for number in range(3):
        rig.start(f"r{number}", prompt, params)
    rig.turn()

    worker.reserve(64 * row_bytes)

    assert worker.kv_cache_bytes == MIN_KV_CACHE_BYTES
    with pytest.raises(RequestError, match="to spare") as refused:
        worker.reserve(1)
    assert "--memory" in refused.value.remedy
    rig.publish_step(first_step(plan, rig.layout, epoch=0))
    rig.run_until_quiet()
    assert len(rig.final_events("r")) == 1


def test_what_can_have_no_form_is_refused_at_the_door() -> None:
    rig = Rig(1)
    rig.add_scheduler()
    prompt, params = ASKED["greedy"]
    unsatisfiable = json_format({"allOf": [{"type": "string"}, {"type": "null"}]})
    endless = replace(params, ignore_eos=True)
    for number, (sampling, wanted) in enumerate(
        [(params, unsatisfiable), (endless, json_format())]
    ):
        rig.submit(
            Request(f"r{number}", token_ids=prompt, sampling=sampling, response_format=wanted)
        )

    rig.run_until_quiet()

    assert "cannot be compiled" in rig.record("r0").error
    assert "ignore_eos" in rig.record("r1").error


def test_a_format_travels_and_is_remembered() -> None:
    wanted = call_format()
    request = Request("r", token_ids=(5,), response_format=wanted)

    assert codec.decode(codec.encode(request)) == request
    assert codec.decode(codec.encode_json(request), codec.JSON) == request
    rig = Rig(1)
    rig.admit("r", (5, 6), response_format=wanted)
    assert rig.record("r").response_format == wanted
    assert processors_of(rig.record("r")) == []


def test_properties_by_the_hundred_travel() -> None:
    wanted = json_format({"properties": {f"p{i}": True for i in range(256)}})

    request = Request("r", token_ids=(5,), response_format=wanted)

    assert codec.decode(codec.encode(request)) == request
