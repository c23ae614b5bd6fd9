"""`cellpipe enqueue`, `result` and `batch` on a real cluster, and what survives kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api_server import ApiServer
from tests.gguf_files import write_gguf
from tests.processes import ProcessCluster, cellpipe
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

NUM_LINES = 500


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        loaded = cluster.run("load", str(write_gguf(tmp_path / "tiny.gguf")))
        assert loaded.returncode == 0, loaded.stderr
        cluster.start("scheduler")
        yield cluster


def test_what_was_enqueued_is_answered_later(cluster: ProcessCluster, tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("hello world")
    common = ["--raw", "-n", "6", "--seed", "1"]

    unknown = cluster.run("result", "r-unknown")
    # A request waits 15 s for a first worker: on a busy machine two commands may take as long.
    enqueued = cluster.run("enqueue", "hello world", *common)
    too_early = cluster.run("result", enqueued.stdout.strip())
    cluster.start("worker")
    followed = cluster.run("result", enqueued.stdout.strip(), "--follow")
    again = json.loads(cluster.run("result", enqueued.stdout.strip(), "--json").stdout)
    named = cluster.run(
        "enqueue", "--file", str(question), *common, "--batch", "--id", "mine", "--json"
    )
    from_file = json.loads(cluster.run("result", "mine", "--json", "--follow").stdout)
    wrong = cluster.run("result", "r-wrong", "--follow", "--timeout", "2")
    failed = cluster.run("enqueue", "x" * 5_000, "--id", "long")
    refused = cluster.run("result", "long", "--follow")

    assert enqueued.returncode == 0, enqueued.stderr
    assert re.fullmatch(r"r-[0-9a-f]{24}\n", enqueued.stdout)
    assert (too_early.returncode, unknown.returncode) == (3, 3)
    assert "--follow" in too_early.stderr
    assert "not known" in unknown.stderr
    assert wrong.returncode == 3
    assert "cellpipe: request r-wrong is not known: it waits in its queue" in wrong.stderr
    assert "request r-wrong is not known after 2 s" in wrong.stderr
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout == again["text"] + "\n"
    assert json.loads(named.stdout) == {"request_id": "mine"}
    assert from_file["token_ids"] == again["token_ids"]
    assert failed.returncode == 0
    assert refused.returncode == 1
    assert "positions" in refused.stderr


def test_what_nobody_takes_is_told_by_its_id_and_can_be_cancelled_in_its_queue(
    amqp_url: str, fresh_redis_url: str, tmp_path: Path
) -> None:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        loaded = cluster.run("load", str(write_gguf(tmp_path / "tiny.gguf")))
        assert loaded.returncode == 0, loaded.stderr

        asked = cluster.run("run", "--cluster", "--raw", "hello")
        (request_id,) = re.findall(r"request (r-[0-9a-f]{24}): no scheduler runs", asked.stderr)
        unknown = cluster.run("cancel", request_id)
        cancelled = cluster.run("cancel", request_id, "--queued")
        again = cluster.run("cancel", request_id, "--queued")
        cluster.start("scheduler")
        ended = json.loads(cluster.run("result", request_id, "--json", "--follow").stdout)

    assert asked.returncode == 3
    assert "start one: cellpipe scheduler" in asked.stderr
    assert f"cellpipe result {request_id} --follow" in asked.stderr
    assert unknown.returncode == 1
    assert f"cellpipe cancel {request_id} --queued" in unknown.stderr
    assert cancelled.stdout == f"{request_id} cancelled\n"
    assert again.stdout == f"{request_id} had ended already (abort)\n"
    assert (ended["finish_reason"], ended["token_ids"]) == ("abort", [])


def test_each_name_of_a_model_is_taken_at_every_door(
    amqp_url: str, fresh_redis_url: str, tmp_path: Path
) -> None:
    model = write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")  # a tiny one, called so
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        loaded = cluster.run("load", str(model), "--json")
        model_id = json.loads(loaded.stdout)["model_id"]
        names = ["smollm2-135m", "smollm2-135m-instruct.q4_1", model_id]
        cluster.start("scheduler", "--model", names[0])
        cluster.start("worker", "--model", names[1])
        cluster.wait_until_serving(1)
        asked = ["hello", "--raw", "-n", "4"]
        file, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        lines = [batch_line(n) | {"custom_id": name} for n, name in enumerate(names)]
        for line, name in zip(lines, names, strict=True):
            line["body"]["model"] = name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

        run = [cluster.run("run", "--cluster", *asked, "-m", name) for name in names]
        enqueued = [cluster.run("enqueue", *asked, "-m", name) for name in names]
        results = [
            cluster.run("result", e.stdout.strip(), "--follow", "-m", name)
            for e, name in zip(enqueued, names, strict=True)
        ]
        batch = cluster.run("batch", str(file), "-o", str(answers), "--cluster", "-m", names[0])
        with ApiServer(
            "gateway", "--model", names[0], settings=cluster.settings, log=tmp_path / "gateway.log"
        ) as server:
            by_http = [
                server.call(
                    "POST", "/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 4}
                )
                for name in names
            ]
        other = cluster.run("run", "--cluster", *asked, "-m", f"{names[1]}@00")

    assert [r.returncode for r in (*run, *enqueued, *results)] == [0] * 9, run[0].stderr
    assert len({r.stdout for r in (*run, *results)}) == 1
    assert batch.returncode == 0, answers.read_text()
    assert [status for status, _, _ in by_http] == [200] * 3
    assert other.returncode == 1
    assert "name one of those" in other.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["enqueue"],
        ["enqueue", "hello", "--file", "x"],
        ["enqueue", "--file", "/does/not/exist"],
        ["enqueue", "hello", "--id", "not an id"],
        ["enqueue", "hello", "--raw", "--system", "x"],
        ["result", "not an id"],
        ["result", "r-1", "--timeout", "5"],
        ["batch", "/does/not/exist", "-o", "out"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_needs_no_server(arguments: list[str]) -> None:
    result = cellpipe(*arguments)

    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_an_id_that_cannot_be_is_named_by_its_option() -> None:
    result = cellpipe("enqueue", "--id", "a b", "hi")

    assert result.returncode == 2
    assert result.stderr.startswith("cellpipe: --id must be 1-64 letters")
    assert "'a b'" in result.stderr


def test_a_batch_that_is_killed_is_gone_on_with_and_has_one_line_each(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    cluster.start("worker")
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(batch_line(n)) + "\n" for n in range(NUM_LINES)))
    command = ["batch", str(requests), "-o", str(answers), "--cluster", "--concurrency", "8"]

    for number, how in [(40, signal.SIGKILL), (150, signal.SIGKILL), (300, signal.SIGINT)]:
        run = cluster.start(*command)
        wait_for_lines(answers, number, run)
        os.kill(run.pid, how)
        assert run.wait(WAIT_S) == (130 if how == signal.SIGINT else -how), cluster.logs()
        assert number <= num_lines(answers) < NUM_LINES, "it was to be killed on its way"
    last = cluster.run(*command)
    once_more = cluster.run(*command)

    assert last.returncode == 1, last.stderr  # for the lines that ask for what is not served
    assert f"{NUM_LINES} of {NUM_LINES} done" in last.stderr
    assert f"{NUM_LINES // 10} with errors" in last.stderr
    assert "--attempt 2" in last.stderr
    assert "line 8 ('line 007'): " in last.stderr
    assert "nothing was to do" in once_more.stderr
    assert "tok/s" not in once_more.stderr
    lines = [json.loads(text) for text in answers.read_text().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == [f"line {n:03}" for n in range(NUM_LINES)]
    for line in lines:
        expected = 400 if line["custom_id"].endswith("7") else 200
        assert line["response"]["status_code"] == expected, line
    admitted = re.findall(r"request_admitted .*request_id=(batch-\w+)", cluster.logs())
    assert len(admitted) == len(set(admitted)) == NUM_LINES * 9 // 10, "computed again"


def batch_line(number: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 12}
    if number % 10 == 7:
        body["web_search_options"] = {}
    return {
        "custom_id": f"line {number:03}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path: Path, number: int, run: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while num_lines(path) < number:
        assert run.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline_s, f"{num_lines(path)} lines"
        time.sleep(0.005)
