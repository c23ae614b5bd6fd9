"""llama.cpp under the same split and load: rpc-server for each layer group, llama-server in front.

One group is a llama-server alone, its fastest. A llama-bench that lies beside it first tells what
one stream gives without HTTP. Binaries are the user's own; ends only what it started.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.bench.cluster import OpenPeer, Peer
from services.bench.latency import Stream
from services.bench.options import ClusterOptions
from services.bench.rig import Prompts
from shared.errors import ConfigError, RequestError

HOST = "127.0.0.1"
SERVER, BENCH = "llama-server", "llama-bench"
RPC_NAMES = ("rpc-server", "ggml-rpc-server")  # the newer name second
START_PATIENCE_S = 180.0
BENCH_TIMEOUT_S = 600.0
LOOK_S = 0.1
SPARE_POSITIONS = 8  # of a slot


def open_llama_peer(folder: Path, model_file: Path, options: ClusterOptions) -> OpenPeer:
    """What opens the peer for a number of groups. Raises `ConfigError` if a binary is missing."""
    server = _binary(folder, (SERVER,))
    rpc = _binary(folder, RPC_NAMES) if max(options.num_groups) > 1 else None
    bench = folder / BENCH if (folder / BENCH).is_file() else None

    @contextmanager
    def open_peer(num_groups: int, logs: Path) -> Iterator[Peer]:
        common = ["-m", str(model_file), "-t", str(options.threads * options.workers_per_group)]
        with ExitStack() as stack:
            if num_groups > 1:
                servers = [
                    stack.enter_context(
                        _rpc_server(rpc, common[-1], logs / f"rpc-server-{num_groups}.{g}.log")
                    )
                    for g in range(num_groups)
                ]
                common += ["--rpc", ",".join(servers), "-ngl", "999"]
            one_stream = None
            if bench is not None:  # first: an rpc-server serves one client at a time
                split = ["-ts", "/".join("1" * num_groups)] if num_groups > 1 else []
                one_stream = _bench([str(bench), *common, *split], options)
            split = ["-ts", ",".join("1" * num_groups)] if num_groups > 1 else []
            log = logs / f"llama-server-{num_groups}.log"
            port = stack.enter_context(_llama_server([str(server), *common, *split], options, log))
            yield LlamaServer(port, options.patience_s, one_stream)

    return open_peer


@contextmanager
def _rpc_server(binary: Path | None, threads: str, log: Path) -> Iterator[str]:
    """Its address."""
    port = _free_port()
    with _running([str(binary), "-H", HOST, "-p", str(port), "-t", threads], log) as process:
        _wait(process, lambda: _listens(port), log)
        yield f"{HOST}:{port}"


@contextmanager
def _llama_server(command: Sequence[str], options: ClusterOptions, log: Path) -> Iterator[int]:
    """Its port. It has a slot for each stream."""
    port = _free_port()
    slots = max(options.concurrency)
    positions = options.num_prompt + options.num_tokens + SPARE_POSITIONS
    words = ["--host", HOST, "--port", str(port), "-np", str(slots), "-c", str(slots * positions)]
    with _running([*command, *words], log) as process:
        _wait(process, lambda: _is_healthy(port), log)
        yield port


class LlamaServer:
    """A `Peer` over the HTTP API of a llama-server."""

    def __init__(self, port: int, patience_s: float, one_stream_tokens_per_s: float | None) -> None:
        self.one_stream_tokens_per_s = one_stream_tokens_per_s
        self._port = port
        self._patience_s = patience_s

    def answer(self, prompts: Prompts, num_tokens: int) -> list[Stream]:
        """Raises `RequestError` when one does not answer as it was asked."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._stream(prompt, num_tokens), prompts))

    def _stream(self, prompt: Sequence[int], num_tokens: int) -> Stream:
        question = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        link = http.client.HTTPConnection(HOST, self._port, timeout=self._patience_s)
        began_s = time.monotonic()
        try:
            link.request(
                "POST", "/completion", json.dumps(question), {"Content-Type": "application/json"}
            )
            answer = link.getresponse()
            if answer.status != http.client.OK:
                raise RequestError(f"{SERVER} refused: {answer.read()[:300]!r}")
            arrivals_s, num_predicted = read_events(iter(answer.readline, b""), time.monotonic)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"{SERVER} did not answer: {error!r}") from error
        finally:
            link.close()
        if num_predicted != num_tokens or len(arrivals_s) < 2:
            raise RequestError(f"{SERVER} gave {num_predicted} of {num_tokens} tokens")
        return Stream(began_s, arrivals_s, num_predicted)


def read_events(
    lines: Iterator[bytes], clock: Callable[[], float]
) -> tuple[tuple[float, ...], int]:
    """When tokens came, and how many in all, from the lines of a stream of events.

    The last event holds the count; a text that is not whole yet is held back by the server, so
    several tokens may come at once.
    """
    arrivals_s: list[float] = []
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("stop"):
            return tuple(arrivals_s), int(event["tokens_predicted"])
        arrivals_s.append(clock())
    raise ValueError("the stream broke off")


def _bench(command: Sequence[str], options: ClusterOptions) -> float:
    """Tokens per second of one stream without a prompt. Raises `ConfigError` if it fails."""
    words = ["-p", "0", "-n", str(options.num_tokens), "-r", str(options.rounds), "-o", "json"]
    try:
        done = subprocess.run(
            [*command, *words], capture_output=True, check=True, timeout=BENCH_TIMEOUT_S
        )
        return float(json.loads(done.stdout)[0]["avg_ts"])
    except (subprocess.SubprocessError, ValueError, LookupError, OSError) as error:
        raise ConfigError(f"{command[0]} gave no result: {error}") from error


def _binary(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file() and os.access(folder / name, os.X_OK):
            return folder / name
    raise ConfigError(
        f"--peer-bin {folder} holds no {' or '.join(names)}",
        remedy="build llama.cpp with -DGGML_RPC=ON and give its build/bin folder",
    )


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at our terminal is for us
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], is_up: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + START_PATIENCE_S
    while not is_up():
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = log.read_text(errors="replace")[-1500:]
            raise ConfigError(f"the peer does not come up: {said}")
        time.sleep(LOOK_S)


def _is_healthy(port: int) -> bool:
    link = http.client.HTTPConnection(HOST, port, timeout=5.0)
    try:
        link.request("GET", "/health")
        return link.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


def _listens(port: int) -> bool:
    """Without connecting: an rpc-server serves one client at a time."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
