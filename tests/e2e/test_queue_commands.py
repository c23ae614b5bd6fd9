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
    named = cluster.run("enqueue", "--file", str(question), *common, "--batch", "--id", "mine")
    from_file = json.loads(cluster.run("result", "mine", "--json", "--follow").stdout)
    failed = cluster.run("enqueue", "x" * 5_000, "--id", "long")
    refused = cluster.run("result", "long", "--follow")

    assert enqueued.returncode == 0, enqueued.stderr
    assert re.fullmatch(r"r-[0-9a-f]{24}\n", enqueued.stdout)
    assert (too_early.returncode, unknown.returncode) == (3, 3)
    assert "--follow" in too_early.stderr
    assert "not known" in unknown.stderr
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout == again["text"] + "\n"
    assert named.stdout == "mine\n"
    assert from_file["token_ids"] == again["token_ids"]
    assert failed.returncode == 0
    assert refused.returncode == 1
    assert "positions" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["enqueue"],
        ["enqueue", "hello", "--file", "x"],
        ["enqueue", "--file", "/does/not/exist"],
        ["enqueue", "hello", "--id", "not an id"],
        ["enqueue", "hello", "--raw", "--system", "x"],
        ["result", "not an id"],
        ["batch", "/does/not/exist", "-o", "out"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_needs_no_server(arguments: list[str]) -> None:
    result = cellpipe(*arguments)

    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


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
