"""`cellpipe dead`, `cancel`, `workers` and `drain` on a real cluster."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent
from shared.topology import DEAD_QUEUE
from tests.gguf_files import write_gguf
from tests.processes import ProcessCluster
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.servers


def test_an_operator_sees_cancels_drains_and_buries(
    amqp_url: str, fresh_redis_url: str, tmp_path: Path
) -> None:
    with (
        ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster,
        closing(connect(fresh_redis_url)) as stores,
        closing(RabbitmqBroker.connect(amqp_url)) as broker,
    ):
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        assert cluster.run("load", str(write_gguf(tmp_path / "tiny.gguf"))).returncode == 0
        cluster.start("scheduler")
        cluster.wait_until(lambda status: bool(status["schedulers"]))
        ledger = Ledger(stores.meta)

        # cancel: nobody computes, so it runs until it is cancelled
        waiting = Request("r-waiting", token_ids=(5, 6), sampling=SamplingParams(max_tokens=4))
        Producer(broker, ledger).submit(waiting)
        wait_until(lambda: bool(ledger.states(["r-waiting"])), "it is admitted")
        first = cluster.run("cancel", "r-waiting", "--json")
        again = cluster.run("cancel", "r-waiting")
        unknown = cluster.run("cancel", "r-unknown")
        (end,) = ledger.events("r-waiting")
        assert (first.returncode, again.returncode, unknown.returncode) == (0, 0, 1)
        assert isinstance(end, FinalEvent)
        assert end.finish_reason is FinishReason.ABORT
        assert json.loads(first.stdout) == {"request_id": "r-waiting", "cancelled": True}
        assert "abort" in again.stdout
        cancelled = cluster.run("result", "r-waiting")
        assert cancelled.returncode == 1  # 130 is for Ctrl-C
        assert "cancelled" in cancelled.stderr

        # workers and drain
        worker = cluster.start("worker")
        cluster.wait_until_serving(1)
        (seen,) = json.loads(cluster.run("workers", "--json").stdout)
        assert (seen["state"], seen["pid"], seen["groups"]) == ("serving", worker.pid, [0])
        assert cluster.run("drain", "nobody").returncode == 1
        assert cluster.run("dead", "show", "0000").returncode == 1
        assert seen["stages_us"] == {}  # by stage, once it has decoded
        drained = cluster.run("drain", seen["worker_id"], "--json")
        assert json.loads(drained.stdout) == {"worker_id": seen["worker_id"], "state": "draining"}
        assert worker.wait(WAIT_S) == 0
        nobody = cluster.run("workers", "--json")
        assert (nobody.returncode, json.loads(nobody.stdout)) == (3, [])

        # dead letters
        cluster.run("dead", "purge", "--all")
        broker.publish([Outgoing(DEAD_QUEUE, b"\x93garbage", persistent=True)]).wait(WAIT_S)
        listed = cluster.run("dead", "list")
        letter_id = re.match(r"[0-9a-f]+", listed.stdout)
        assert letter_id, listed.stdout + listed.stderr
        shown = json.loads(cluster.run("dead", "show", letter_id[0], "--json").stdout)
        retried = cluster.run("dead", "retry", letter_id[0])
        rows = cluster.run("dead", "show", letter_id[0]).stdout
        purged = cluster.run("dead", "purge", letter_id[0])
        assert bytes.fromhex(shown["body_hex"]) == b"\x93garbage"
        assert retried.returncode == 1
        assert f"cellpipe dead purge {letter_id[0]}" in retried.stderr
        assert shown["history"]["group"] is shown["history"]["died_unix_ms"] is None
        assert "died" not in rows
        assert "reason" not in rows
        assert purged.stdout == "1 dropped\n"
        assert cluster.run("dead", "list").stdout == "no dead letters\n"
