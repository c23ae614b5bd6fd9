"""The HTTP API of a cluster: what dies, and streams that go on all the same."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api_server import ApiServer, ServerEvent, entries_of, read_events, texts_of
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "seed": 5,
    "max_tokens": 300,
    "ignore_eos": True,
}
SHAPED = {
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {"40": 2, "77": -100},
    "logprobs": True,
    "top_logprobs": 2,
}
NUM_STREAMS = 200


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[ProcessCluster]:
    """Two groups of two workers and one of one scheduler, and a tiny model."""
    model = write_gguf(tmp_path / "babbler.gguf", TinyModel(context=2048))
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path / "cache")
        cluster.load(model, groups=2)
        for group in (0, 0, 1, 1):
            cluster.start("worker", "--group", str(group))
        cluster.start("scheduler")
        cluster.wait_until_serving(4)
        yield cluster


def test_openais_client_and_a_stream_over_killed_gateways_and_workers(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    rng = random.Random(2)
    with ExitStack() as open_servers:

        def gateway(number: int) -> ApiServer:
            log = tmp_path / f"gateway-{number}.txt"
            return open_servers.enter_context(
                ApiServer("gateway", settings=cluster.settings, log=log)
            )

        server = gateway(0)
        assert server.call("GET", "/ready")[0] == 200
        whole = server.client().chat.completions.create(
            model="babbler",
            messages=[{"role": "user", "content": "hello"}],
            seed=5,
            max_tokens=300,
            extra_body={"ignore_eos": True, "repetition_penalty": 1.1, "min_p": 0.001, **SHAPED},
        )
        expected = whole.choices[0].message.content
        assert whole.choices[0].logprobs is not None
        logprobs = [entry.model_dump() for entry in whole.choices[0].logprobs.content or ()]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 300

        body = {**BODY, **SHAPED, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"repetition_penalty": 1.1, "min_p": 0.001}
        events: list[ServerEvent] = []
        for number in range(1, 4):  # a gateway dies; then also a worker
            headers = {"last-event-id": events[-1].event_id} if events else {}
            stream = server.stream(CHAT, body, headers)
            events += read_events(stream.response.read(rng.randrange(600, 3_000)))
            server.kill()
            stream.close()
            if number == 2:
                cluster.processes[0].kill()
            server = gateway(number)
        headers = {"last-event-id": events[-1].event_id}
        events += read_events(server.stream(CHAT, body, headers).read())

        assert texts_of(events) == [expected]
        assert entries_of(events) == logprobs
        assert len(logprobs) > 200
        assert events[-1].document is None
        usage = next(
            e.document["usage"] for e in events if e.document and not e.document["choices"]
        )
        assert usage["completion_tokens"] == 300


def test_a_cluster_without_a_scheduler_is_not_ready_and_refuses_after_a_while(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    log = tmp_path / "gateway.txt"
    with ApiServer("gateway", "--keep-alive", "0.1", settings=cluster.settings, log=log) as server:
        scheduler = cluster.processes[-1]
        scheduler.terminate()
        scheduler.wait(timeout=30)
        while server.call("GET", "/ready")[0] == 200:
            pass
        status, answer, _ = server.call("GET", "/ready")
        assert (status, answer["reason"]) == (503, "no scheduler runs")
        seen = server.stream(CHAT, {**BODY, "stream": True}).read_some(700)
        assert seen.startswith(b"id: "), "it can be resumed before its first token"
        assert b"\n\n: keep-alive\n: keep-alive\n" in seen
        wait = threading.Event()
        for _ in range(40):
            with pytest.raises(openai.APIError) as refused:
                server.client().with_options(timeout=1).chat.completions.create(
                    model="babbler", messages=[{"role": "user", "content": "hello"}], max_tokens=1
                )
            if isinstance(refused.value, openai.InternalServerError):
                break
            wait.wait(0.1)

    assert isinstance(refused.value, openai.InternalServerError)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_what_the_cluster_refuses_is_a_400_that_names_the_field(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    generous = cluster.processes[-1]
    cluster.start("scheduler", "--kv-budget", "16KiB")
    generous.terminate()
    generous.wait(timeout=30)
    with ApiServer("gateway", settings=cluster.settings, log=tmp_path / "gateway.txt") as server:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                server.client().chat.completions.create(
                    model="babbler",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=300,
                    stream=stream,
                )
            assert (refused.value.param, refused.value.code) == ("max_tokens", "kv_memory_exceeded")
            assert "--kv-budget" in refused.value.message


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_streams_are_held_for_a_minute(cluster: ProcessCluster, tmp_path: Path) -> None:
    with ApiServer("gateway", settings=cluster.settings, log=tmp_path / "gateway.txt") as server:
        seeds = range(20)

        def body(seed: int) -> dict[str, Any]:
            return {**BODY, "seed": seed, "max_tokens": 150}

        expected = {}
        for seed in seeds:
            _, answer, _ = server.call("POST", CHAT, body(seed))
            expected[seed] = answer["choices"][0]["message"]["content"]
        over_s = time.monotonic() + 60.0

        def hold(number: int) -> int:
            """Stream after stream for a minute; how many."""
            num_streams = 0
            while time.monotonic() < over_s:
                seed = (number + num_streams) % len(seeds)
                raw = server.stream(CHAT, {**body(seed), "stream": True}).read()
                events = list(read_events(raw))
                assert texts_of(events) == [expected[seed]], raw[-500:]
                assert events[-1].document is None
                num_streams += 1
            return num_streams

        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            counts = list(threads.map(hold, range(NUM_STREAMS)))
        status = Path(f"/proc/{server.process.pid}/status").read_text()

    assert all(counts)
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    print(f"{sum(counts)} streams of 150 tokens, peak {peak_kb} kB")
    assert peak_kb < 200_000


def test_two_hundred_streams_at_once_are_each_as_if_alone(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    with ApiServer("gateway", settings=cluster.settings, log=tmp_path / "gateway.txt") as server:

        def ask(seed: int, *, stream: bool) -> str:
            body = {**BODY, "seed": seed, "max_tokens": 24, "stream": stream}
            if stream:
                return texts_of(list(read_events(server.stream(CHAT, body).read())))[0]
            _, answer, _ = server.call("POST", CHAT, body)
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            found = list(threads.map(lambda seed: ask(seed % 20, stream=True), range(NUM_STREAMS)))
        expected = [ask(seed, stream=False) for seed in range(20)]
        status = Path(f"/proc/{server.process.pid}/status").read_text()

    assert found == [expected[seed % 20] for seed in range(NUM_STREAMS)]
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kb < 200_000
