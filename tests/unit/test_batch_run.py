"""A batch has one line for every request, whatever goes wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.batch.lines import BatchInput, Reading
from services.batch.output import BatchOutput
from services.batch.run import BatchLimits, BatchRun
from services.scheduler.limits import SchedulerLimits
from services.worker.worker import Worker
from shared.errors import ConfigError, TransientError
from shared.messages import FinishReason
from shared.producer import Producer
from shared.text.chat_template import ChatTemplate
from shared.topology import BATCH_QUEUE
from tests.gguf_files import CHAT_TEMPLATE
from tests.rig import Rig
from tests.rig_model import rig_api_model, rig_tokenizer

CHAT = "/v1/chat/completions"


class Killed(BaseException):
    """As SIGKILL: nothing of the run goes on."""


def chat_line(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": fields}


class Batch:
    """An input and an output file, a rig that serves it, and runs of it."""

    def __init__(self, folder: Path, lines: list[Any], *, num_workers: int = 1) -> None:
        self.rig = Rig(1)
        for _ in range(num_workers):
            self.rig.add_worker(0)
        self.rig.add_scheduler()
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.input.write_text(
            "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
        )
        self.submitted: list[str] = []
        self.model = rig_api_model()

    def run(
        self,
        *,
        until: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
        attempt: int = 1,
        **limits: Any,
    ) -> BatchRun:
        """Run it to its end, or until something is so: there it is killed."""
        batch = BatchInput(self.input, salt="tiny", attempt=attempt)
        producer = Producer(self.rig.new_broker(), self.rig.ledger, tokenizer=rig_tokenizer())
        submit = producer.submit

        def counted(request: Any, **options: Any) -> str:
            self.submitted.append(request.request_id)
            return submit(request, **options)

        producer.submit = counted  # type: ignore[method-assign]
        reading = Reading(self.model, chat_tokens=8)
        with closing(BatchOutput(self.output, batch.entries, attempt=attempt)) as output:
            run = BatchRun(
                producer,
                output,
                batch.entries,
                lambda entry: batch.read(entry, reading),
                check,
                reading.model,
                BatchLimits(**limits),
                clock=self.rig.clock,
                sleep=lambda seconds: (self.rig.clock.sleep(seconds), self.rig.turn())[0],
            )
            while not run.is_done:
                if until():
                    raise Killed
                run.turn()
            return run

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def by_id(self) -> dict[str | None, dict[str, Any]]:
        lines = self.lines()
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines), "a line is there twice"
        return found


def test_every_line_has_an_answer_in_openais_form(tmp_path: Path) -> None:
    body = {"prompt": "hello world", "max_tokens": 3, "ignore_eos": True}
    completion = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    batch = Batch(tmp_path, [chat_line("a", ignore_eos=True), completion])

    run = batch.run()

    chat, text = batch.by_id()["a"], batch.by_id()["c"]
    assert chat["error"] is text["error"] is None
    assert chat["id"] == chat["response"]["request_id"]
    body = chat["response"]["body"]
    assert (chat["response"]["status_code"], body["object"]) == (200, "chat.completion")
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 4
    assert text["response"]["body"]["object"] == "text_completion"
    usage = text["response"]["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 3, 5)
    assert (run.progress().num_done, run.progress().num_failed) == (2, 0)
    assert run.progress().num_tokens == 7


def test_log_probabilities_are_in_the_answers_that_asked_for_them(tmp_path: Path) -> None:
    asking = chat_line("chat", logprobs=True, top_logprobs=2, ignore_eos=True)
    body = {"prompt": "hello", "logprobs": 1, "max_tokens": 4, "ignore_eos": True}
    text = {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": body}
    batch = Batch(tmp_path, [asking, text, chat_line("none")])

    batch.run()

    by_name = {name: line["response"]["body"] for name, line in batch.by_id().items()}
    chat = by_name["chat"]["choices"][0]
    shown = b"".join(bytes(entry["bytes"]) for entry in chat["logprobs"]["content"])
    assert shown.decode(errors="replace") == chat["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in chat["logprobs"]["content"]} == {2}
    assert len(by_name["text"]["choices"][0]["logprobs"]["tokens"]) <= 4
    assert by_name["none"]["choices"][0]["logprobs"] is None


def test_what_is_wrong_with_a_line_is_in_its_answer_and_the_others_go_on(tmp_path: Path) -> None:
    lines: list[Any] = [
        chat_line("good"),
        "{not json",
        json.dumps({"method": "POST", "url": CHAT, "body": {}}),
        chat_line("search", web_search_options={}),
        chat_line("stream", stream=True),
        chat_line("long", text="a" * 300),
        chat_line("hot", temperature="warm"),
        chat_line("none", messages=[]),
        chat_line("other", model="gpt-4o"),
        json.dumps(chat_line("half", **{"\ud800": 1})),
        json.dumps(chat_line("half a pair", text="\ud800")),
        {"custom_id": "embed", "method": "POST", "url": "/v1/embeddings", "body": {}},
        "",
        {"custom_id": "get", "method": "GET", "url": CHAT, "body": {}},
    ]
    batch = Batch(tmp_path, lines)

    run = batch.run()

    answers = batch.lines()
    nameless = [line for line in answers if line["custom_id"] is None]
    named = {line["custom_id"]: line for line in answers if line["custom_id"] is not None}
    assert [line["error"]["code"] for line in nameless] == ["invalid_line"] * 2
    assert "line 2 is not JSON" in nameless[0]["error"]["message"]
    assert named.pop("good")["response"]["status_code"] == 200
    told = {name: line["response"]["body"]["error"] for name, line in named.items()}
    assert named["other"]["response"]["status_code"] == 404
    assert {line["response"]["status_code"] for line in named.values()} == {400, 404}
    assert {name: error["param"] for name, error in told.items()} == {
        "search": "web_search_options", "stream": "stream", "long": "messages",
        "hot": "temperature", "none": "messages", "other": "model",
        "half": None, "half a pair": None,
        "embed": "url", "get": "method",
    }  # fmt: skip
    assert told["long"]["code"] == "context_length_exceeded"
    assert told["other"]["code"] == "model_not_found"
    assert (run.progress().num_done, run.progress().num_failed) == (13, 12)


def test_stop_strings_and_several_choices_are_as_by_http(tmp_path: Path) -> None:
    batch = Batch(
        tmp_path,
        [
            chat_line("whole", seed=3, max_tokens=40, ignore_eos=True),
            chat_line("two", seed=3, n=2, max_tokens=40, ignore_eos=True),
        ],
    )
    batch.run()
    (whole,), two = (texts_of(batch.by_id()[name]) for name in ("whole", "two"))
    stop = whole[len(whole) // 2 :][:3]
    assert whole.index(stop) > 0
    lines = [
        chat_line("cut", seed=3, max_tokens=200, ignore_eos=True, stop=stop),
        chat_line("none", seed=3, max_tokens=40, ignore_eos=True, stop=["never said, not at all"]),
    ]
    batch.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch.output.unlink()
    batch.run(concurrency=1)

    cut, none = batch.by_id()["cut"], batch.by_id()["none"]
    assert two[0] == whole
    assert two[1] != whole
    usage = batch_usage(cut)
    assert texts_of(cut) == [whole[: whole.index(stop)]]
    assert cut["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    assert usage["completion_tokens"] <= 40
    assert texts_of(none) == [whole]
    (record,) = [batch.rig.ledger.get(i) for i in batch.submitted if "-c" not in i][2:3]
    assert record is not None
    assert record.finish_reason is FinishReason.STOP, "nobody wants what comes after it"


def test_forms_and_calls_are_as_by_http(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}
    lines = [
        chat_line("form", max_tokens=60, response_format=wanted),
        chat_line(
            "call", max_tokens=180, tools=[tool], tool_choice="required", parallel_tool_calls=False
        ),
    ]
    batch = Batch(tmp_path, lines)
    # In few words, as the tiny model holds few.
    names = "{% if tools %}<tool_call> {{ tools[0].function.name }} {% endif %}"
    batch.model = replace(batch.model, chat_template=ChatTemplate(names + CHAT_TEMPLATE))

    batch.run()

    (form,) = texts_of(batch.by_id()["form"])
    (choice,) = batch.by_id()["call"]["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(form) == {"a": 1}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {})


def texts_of(line: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in line["response"]["body"]["choices"]]


def batch_usage(line: dict[str, Any]) -> dict[str, int]:
    return dict(line["response"]["body"]["usage"])


def test_a_run_that_is_killed_anywhere_is_resumed_and_computes_nothing_twice(
    tmp_path: Path,
) -> None:
    names = [f"line {n}" for n in range(12)]
    batch = Batch(tmp_path, [chat_line(name, text=name, ignore_eos=True) for name in names])
    for num_lines in (0, 1, 5, 11):

        def so_many_are_written(number: int = num_lines) -> bool:
            return bool(batch.submitted) and len(batch.lines()) >= number

        with pytest.raises(Killed):
            batch.run(concurrency=3, until=so_many_are_written)
    batch.run(concurrency=3)

    answers = batch.by_id()
    assert set(answers) == set(names)
    assert {line["response"]["status_code"] for line in answers.values()} == {200}
    (worker,) = [actor for actor in batch.rig.actors if isinstance(actor, Worker)]
    assert worker.num_steps_done <= 12 * 4, "a request was computed again"


def test_a_torn_last_line_is_written_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a"), chat_line("b")])
    batch.run()
    whole = batch.output.read_bytes()
    for num_bytes in (1, len(whole) // 2, len(whole) - 1):
        batch.output.write_bytes(whole[:num_bytes])

        batch.run()

        assert set(batch.by_id()) == {"a", "b"}
        assert len(batch.output.read_bytes().splitlines()) == 2


def test_a_finished_batch_asks_nothing_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a"), chat_line("b", suffix="x")])
    batch.run()
    batch.submitted.clear()

    run = batch.run()

    assert batch.submitted == []
    assert (run.progress().num_done, run.progress().num_failed) == (2, 1)


def test_no_more_than_the_bound_is_under_way(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line(f"{n}") for n in range(20)], num_workers=0)

    def all_that_may_be_are_there() -> bool:
        assert len(batch.submitted) <= 5
        return batch.rig.clock() > 1_030.0

    with pytest.raises(Killed):
        batch.run(concurrency=5, until=all_that_may_be_are_there)

    assert len(batch.submitted) == 5
    assert batch.rig.num_messages(BATCH_QUEUE) == 5


def test_a_line_of_many_requests_waits_until_they_fit(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a"), chat_line("three", n=3), chat_line("b")])

    def no_more_than_the_bound() -> bool:
        known = batch.rig.ledger.states(batch.submitted)
        assert sum(state.finish_reason is None for state in known.values()) <= 3
        return False

    batch.run(concurrency=3, until=no_more_than_the_bound)

    assert [len(texts_of(batch.by_id()[name])) for name in ("a", "three", "b")] == [1, 3, 1]
    batch.output.unlink()
    batch.run(concurrency=2)
    assert len(texts_of(batch.by_id()["three"])) == 3, "alone it may have more"


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line(f"{n}") for n in range(6)])
    batch.rig.kill(batch.rig.actors[-1])
    batch.rig.add_scheduler(limits=SchedulerLimits(max_in_flight=1))
    with batch.rig.hub.lock:
        queue = batch.rig.hub.queues[BATCH_QUEUE]
        queue.spec = replace(queue.spec, max_length=1)

    batch.run(concurrency=6)

    assert {line["response"]["status_code"] for line in batch.lines()} == {200}
    assert len(batch.lines()) == 6


def test_servers_that_stay_away_end_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a")])
    batch.rig.kill(batch.rig.actors[-1])

    def nobody() -> None:
        raise TransientError("no scheduler runs")

    with pytest.raises(TransientError, match="no scheduler runs"):
        batch.run(check=nobody, patience_s=60.0)
    assert batch.rig.clock() > 1_060.0
    batch.rig.add_scheduler()
    batch.run()

    assert batch.by_id()["a"]["response"]["status_code"] == 200


def test_a_cancelled_request_is_an_error_of_its_line(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a"), chat_line("b")], num_workers=0)

    run = batch.run(until=lambda: cancel(batch, batch.submitted))

    assert [line["error"]["code"] for line in batch.lines()] == ["cancelled"] * 2
    assert [line["response"] for line in batch.lines()] == [None] * 2
    assert run.progress().num_failed == 2


def test_another_attempt_asks_for_what_failed_and_only_for_that(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a"), chat_line("b"), chat_line("c", suffix="x")])
    batch.run(until=lambda: cancel(batch, batch.submitted[:1]))
    before = batch.by_id()
    assert before["a"]["error"]["code"] == "cancelled"
    batch.submitted.clear()

    batch.run(attempt=2)

    assert batch.submitted == [before["a"]["id"] + "-2"]
    after = batch.by_id()
    assert after["a"]["response"]["status_code"] == 200
    assert after["b"] == before["b"]
    assert after["c"]["response"]["status_code"] == 400
    batch.submitted.clear()
    assert batch.run(attempt=2).progress().num_failed == 1, "the same command goes on"
    batch.run()
    assert batch.submitted == []
    assert batch.by_id() == after


def cancel(batch: Batch, request_ids: list[str]) -> bool:
    for request_id in request_ids:
        batch.rig.ledger.finish(request_id, FinishReason.ABORT)
    return False


def test_a_request_that_the_store_has_forgotten_is_asked_for_anew(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a")], num_workers=0)
    num_turns = 0

    def forget_once_it_was_seen() -> bool:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 5:
            assert batch.rig.ledger.get(batch.submitted[0]), "it was to be admitted"
            batch.rig.kill(batch.rig.actors[0])
            batch.rig.stores.meta.run(("FLUSHDB",))
            batch.rig.take_deliveries(BATCH_QUEUE)
            batch.rig.close_taps()
            batch.rig.add_worker(0)
            batch.rig.add_scheduler()
        return False

    batch.run(until=forget_once_it_was_seen)

    assert len(batch.submitted) == 2
    assert batch.by_id()["a"]["response"]["status_code"] == 200


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [chat_line("a")])
    batch.run()
    batch.input.write_text(json.dumps(chat_line("a", text="another")) + "\n")

    with pytest.raises(ConfigError, match=r"line 1 of .* answers 'a' as it was: line 1 of the"):
        batch.run()
    batch.input.write_text(json.dumps(chat_line("b")) + "\n")
    with pytest.raises(ConfigError, match="no answer to this input"):
        batch.run()


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with closing(BatchOutput(path, [])), pytest.raises(ConfigError, match="another run"):
        BatchOutput(path, [])
    BatchOutput(path, []).close()


def test_a_custom_id_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [chat_line("a"), chat_line("b"), chat_line("a", text="x")]
    path.write_text("\n".join(map(json.dumps, lines)))

    with pytest.raises(ConfigError, match="'a' on lines 1 and 3"):
        BatchInput(path, salt="")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_input_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match="no request"):
        BatchInput(path, salt="")


def test_repaired_lines_alone_are_asked_for_anew(tmp_path: Path) -> None:
    lines: list[Any] = [chat_line("a"), chat_line("b", suffix="x"), "{not json", chat_line("d")]
    batch = Batch(tmp_path, lines)
    before = batch.run()
    kept = batch.by_id()
    assert before.progress().num_failed == 2
    first, second = before.output.failures
    assert first.startswith("line 2 ('b'): ")
    assert "suffix" in first
    assert second.startswith("line 3: ")
    batch.submitted.clear()

    repaired = [chat_line("a"), chat_line("b"), chat_line("c"), chat_line("d")]
    batch.input.write_text("".join(json.dumps(line) + "\n" for line in repaired))
    run = batch.run()

    assert (run.progress().num_done, run.progress().num_failed) == (4, 0)
    assert run.output.num_repaired == 2
    after = batch.by_id()
    assert len(batch.submitted) == 2
    assert (after["a"], after["d"]) == (kept["a"], kept["d"])
    assert {line["response"]["status_code"] for line in after.values()} == {200}


def test_request_ids_depend_on_line_salt_and_custom_id(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"

    def ids(salt: str, *lines: Any) -> list[str]:
        path.write_text("\n".join(map(json.dumps, lines)))
        return [entry.request_id for entry in BatchInput(path, salt=salt).entries]

    first = ids("model 1", chat_line("a"), chat_line("b"))

    assert ids("model 1", chat_line("a"), chat_line("b")) == first
    assert ids("model 1", chat_line("c"), chat_line("b"))[1] == first[1]
    other = ids("model 2", chat_line("a"), chat_line("b"))
    changed = ids("model 1", chat_line("a", text="x"), chat_line("b", text="x"))
    assert len({*first, *other, *changed}) == 6
