"""`cellpipe bench` measures and says so in JSON. Its figures are not judged: machines differ."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shared.kernel.names import REFERENCE
from shared.model.backend import available_kernels
from tests.gguf_files import TinyModel, write_gguf
from tests.kernel_backends import native_or_skip
from tests.processes import cellpipe


def test_bench_kernel_gives_the_shares_of_every_path() -> None:
    native_or_skip()

    result = cellpipe("bench", "kernel", "--repeats", "1", "--stream-mib", "8", "--json")

    assert result.returncode == 0, result.stderr
    paths = json.loads(result.stdout)["paths"]
    assert set(paths) == {name for name in available_kernels() if name != REFERENCE}
    for figures in paths.values():
        assert figures["bandwidth_share"] > 0
        assert figures["compute_share"] > 0
        assert set(figures["one_core"]["compute_shares"]) == {"4", "16", "64"}
        assert ("all_cores" in figures) == (len(os.sched_getaffinity(0)) > 1)


@pytest.mark.parametrize(("what", "tokens"), [("decode", "3"), ("prefill", "5")])
def test_bench_of_the_pipeline_gives_tokens_per_second(
    what: str, tokens: str, tmp_path: Path
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    settings = {"CELLPIPE_CACHE_DIR": str(tmp_path)}
    options = ["--model", str(model), "--tokens", tokens, "--repeats", "1", "--json"]

    result = cellpipe("bench", what, *options, settings=settings)

    assert result.returncode == 0, result.stderr
    (figures,) = json.loads(result.stdout)["results"]
    assert figures["tokens"] == int(tokens)
    assert figures["cellpipe_tokens_per_s"] > 0
    if what == "decode":
        assert figures["kernel_tokens_per_s"] > 0
        assert figures["overhead_share"] < 1


def test_a_peer_is_run_in_turns_and_compared(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    peer = tmp_path / "llama-bench"
    peer.write_text("""#!/bin/sh\necho '[{"avg_ts": 1.5}]'\n""")
    peer.chmod(0o755)
    options = ["--model", str(model), "--tokens", "4", "--repeats", "2", "--json"]

    result = cellpipe(
        "bench",
        "prefill",
        *options,
        "--peer-bin",
        str(peer),
        settings={"CELLPIPE_CACHE_DIR": str(tmp_path)},
    )

    (figures,) = json.loads(result.stdout)["results"]
    assert figures["peer_tokens_per_s"] == 1.5
    assert figures["ratio"] == pytest.approx(figures["cellpipe_tokens_per_s"] / 1.5, rel=0.9)


def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")

    result = cellpipe("bench", "decode", "--model", str(model), "--peer", "other")

    assert result.returncode == 2
    assert "--peer must be llama.cpp, got 'other'" in result.stderr


def test_a_token_is_timed_by_context_beside_the_kernel(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", TinyModel(context=4_096))
    settings = {"CELLPIPE_CACHE_DIR": str(tmp_path)}
    options = ["--model", str(model), "--tokens", "8", "--repeats", "1"]

    shown = cellpipe(
        "bench", "decode", "--context", "64,1024,4096", *options, "--json", settings=settings
    )
    drawn = cellpipe("bench", "decode", "--context", "16,32", *options, settings=settings)
    refused = cellpipe("bench", "decode", "--context", "64,4097", *options, settings=settings)

    assert shown.returncode == 0, shown.stderr
    results = json.loads(shown.stdout)["results"]
    assert [result["context"] for result in results] == [64, 1024, 4096]
    assert all(result["pipeline_ms"] > 0 < result["kernel_ms"] for result in results)
    assert drawn.returncode == 0, drawn.stderr
    assert "█" in drawn.stdout
    assert "per 1,000 positions" in drawn.stdout
    assert refused.returncode == 2
    assert "4096" in refused.stderr
