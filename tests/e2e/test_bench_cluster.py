"""`cellpipe bench cluster` itself, small: a tiny model, servers and workers of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shared.store.presence_types import STAGES
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import cellpipe
from tests.servers import load_servers_script

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

# Answers like a llama-server, as far as the command asks: as many tokens as wanted, at once.
PEER = f"""#!{sys.executable}
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200); self.end_headers()
        for n in range(asked["n_predict"] + 1):
            event = {{"stop": n == asked["n_predict"], "tokens_predicted": n}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
RPC = f"""#!{sys.executable}
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))):
    time.sleep(600)
"""


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    if missing := load_servers_script().missing_software(("rabbitmq", "redis")):
        pytest.skip(f"not installed: {missing}")
    return write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=4))


def test_every_load_has_its_figures_and_its_hops(tiny_gguf: Path) -> None:
    result = cellpipe(
        "bench", "cluster", "--model", str(tiny_gguf), "--groups", "1,2", "--concurrency", "1,3",
        "--tokens", "12", "--prompt-tokens", "5", "--rounds", "1", "--json",
        settings={"CELLPIPE_CACHE_DIR": str(tiny_gguf.parent)}, timeout_s=170,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert [layout["num_groups"] for layout in figures["layouts"]] == [1, 2]
    for layout in figures["layouts"]:
        assert layout["pika_ping_pong"]["p50_ms"] > 0
        assert layout["pika_hop"]["p50_ms"] > 0
        assert layout["redis_round_trip"]["p50_ms"] > 0
        for point, streams in zip(layout["points"], (1, 3), strict=True):
            assert point["concurrency"] == streams
            assert all(figure > 0 for figure in point["load"].values())
            assert [hop["group"] for hop in point["hops"]] == list(range(layout["num_groups"]))
            for hop in point["hops"]:
                assert set(hop["stage_ms"]) == set(STAGES)
                # In one group few steps travel, and perhaps none of a short answer.
                assert layout["num_groups"] == 1 or hop["stage_ms"]["broker"] > 0
                assert 1 <= hop["batch"] <= streams
            # The stages follow a token all the way round: they cannot be a fraction of its time.
            assert point["way_ms"] > point["gap_ms"] / 4
    assert "round 1/1" in result.stderr


def test_prompts_and_streams_are_measured_alone_and_beside_each_other(tmp_path: Path) -> None:
    if missing := load_servers_script().missing_software(("rabbitmq", "redis")):
        pytest.skip(f"not installed: {missing}")
    model = write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=4, context=2_048))

    result = cellpipe(
        "bench", "cluster", "--mixed", "--model", str(model), "--concurrency", "3",
        "--prompt-tokens", "300", "--prompts", "2", "--rounds", "1", "--json",
        settings={"CELLPIPE_CACHE_DIR": str(tmp_path)}, timeout_s=170,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["num_streams"], figures["num_prompts"]) == (3, 2)
    assert len(figures["rounds"]) == 1
    assert all(figure > 0 for figure in figures["median"].values())
    assert figures["first_ratio"] > 0 < figures["next_p95_ratio"]


def test_quorum_queues_a_short_wire_and_a_peer(tiny_gguf: Path, tmp_path: Path) -> None:
    for name, text in (
        ("llama-server", PEER),
        ("ggml-rpc-server", RPC),
        ("llama-bench", """#!/bin/sh\necho '[{"avg_ts": 1.5}]'\n"""),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    result = cellpipe(
        "bench", "cluster", "--model", str(tiny_gguf), "--concurrency", "2", "--tokens", "8",
        "--rounds", "1", "--queue-type", "quorum", "--wire", "i8",
        "--peer-bin", str(tmp_path), "--json",
        settings={"CELLPIPE_CACHE_DIR": str(tiny_gguf.parent)}, timeout_s=170,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["options"]["queue_type"] == "quorum"
    assert figures["options"]["wire"] == "i8"
    assert figures["layouts"][0]["peer_bench_tokens_per_s"] == 1.5
    (point,) = figures["layouts"][0]["points"]
    assert point["peer"]["load"]["tokens_per_s"] > 0
    assert point["peer"]["ratio"] == pytest.approx(
        point["load"]["tokens_per_s"] / point["peer"]["load"]["tokens_per_s"]
    )


def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for options, named in (
        (("--concurrency", "1,x"), "--concurrency"),
        (("--groups", "0"), "--groups"),
        (("--peer-bin", str(tmp_path)), "llama-server"),
        (("--mixed", "--concurrency", "4,8"), "--concurrency"),
        (("--mixed", "--plot", "x.png"), "--plot"),
    ):
        result = cellpipe("bench", "cluster", *options)

        assert result.returncode == 2, result.stderr
        assert named in result.stderr
        assert "Traceback" not in result.stderr
