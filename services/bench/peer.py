"""Runs llama.cpp on a model file: through the xllamacpp wheel, or a llama-bench that the user has.

Not a dependency: found when it is installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shared.errors import ConfigError

BENCH_TIMEOUT_S = 600


class Peer(Protocol):
    """Tokens per second of one run."""

    def decode(self, num_tokens: int) -> float: ...

    def prefill(self, num_tokens: int) -> float: ...


class WheelPeer:
    """llama.cpp inside this process (PyPI: xllamacpp). Speeds are those that it reports."""

    def __init__(self, model_file: Path, threads: int) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(
                "--peer llama.cpp needs the xllamacpp wheel",
                remedy="pip install xllamacpp, or give --peer-bin the path of a llama-bench",
            ) from error
        params = xllamacpp.CommonParams()
        params.model.path = str(model_file)
        params.n_ctx = 2048
        params.n_parallel = 1
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.warmup = False
        params.verbosity = -1  # it would log to standard error
        self._server = xllamacpp.Server(params)

    def decode(self, num_tokens: int) -> float:
        return float(self._timings([10], num_tokens)["predicted_per_second"])

    def prefill(self, num_tokens: int) -> float:
        return float(self._timings(_prompt(num_tokens), 1)["prompt_per_second"])

    def _timings(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        answer = self._server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "timings_per_token": False,
            }
        )
        timings: dict[str, Any] = answer["timings"]
        return timings


class BinaryPeer:
    """A llama-bench, started once for each run."""

    def __init__(self, binary: Path, model_file: Path, threads: int) -> None:
        if not binary.is_file():
            raise ConfigError(f"--peer-bin {binary} is no file")
        self._command = [str(binary), "-m", str(model_file), "-t", str(threads)]

    def decode(self, num_tokens: int) -> float:
        return self._run("-p", "0", "-n", str(num_tokens))

    def prefill(self, num_tokens: int) -> float:
        return self._run("-p", str(num_tokens), "-n", "0")

    def _run(self, *words: str) -> float:
        command = [*self._command, *words, "-r", "1", "-o", "json"]
        try:
            done = subprocess.run(command, capture_output=True, check=True, timeout=BENCH_TIMEOUT_S)
            return float(json.loads(done.stdout)[0]["avg_ts"])
        except (subprocess.SubprocessError, ValueError, LookupError, OSError) as error:
            raise ConfigError(f"{command[0]} did not give a llama-bench result: {error}") from error


def _prompt(num_tokens: int) -> list[int]:
    return [100 + i for i in range(num_tokens)]


def open_peer(
    model_file: Path, threads: int, *, peer: str | None, binary: Path | None
) -> Callable[[], Peer] | None:
    """What opens the peer that was asked for; None if none was. Raises `ConfigError`."""
    if binary is not None:
        return lambda: BinaryPeer(binary, model_file, threads)
    if peer is None:
        return None
    if peer != "llama.cpp":
        raise ConfigError(f"--peer must be llama.cpp, got {peer!r}")
    return lambda: WheelPeer(model_file, threads)
