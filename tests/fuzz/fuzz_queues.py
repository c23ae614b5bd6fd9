"""Any body in any queue of a running pipeline: nobody crashes, all is settled, requests end.

The pipeline is that of tests/rig.py: everything is real but the clock and the broker's sockets.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from services.scheduler.admission import first_step
from shared import codec
from shared.broker.base import Outgoing
from shared.codec import JSON, MSGPACK
from shared.errors import PermanentError
from shared.messages import Request
from shared.topology import DEAD_QUEUE, REQUESTS_QUEUE
from tests.rig import Rig
from tests.rig_model import GREEDY, prompt_of
from tests.unit.codec_examples import EXAMPLES

PREFIX_BYTES = 1
MAX_TURNS = 4_000
MAX_TOKENS = 8  # of a request that is asked for here: whether long ones end is not the question


class Pipeline:
    """Two groups with a worker each, a scheduler, and one request that is on record."""

    def __init__(self) -> None:
        self.rig = Rig(2)
        self.plan = self.rig.admit("r-known", prompt_of(4), replace(GREEDY, max_tokens=4))
        self._workers = self.rig.add_workers()
        self._scheduler = self.rig.add_scheduler()
        self._queues = [
            (REQUESTS_QUEUE, MSGPACK),
            (REQUESTS_QUEUE, JSON),
            (self.rig.queue(0), MSGPACK),
            (self.rig.queue(1), MSGPACK),
        ]

    def feed(self, body: bytes) -> None:
        """The first byte says where the rest goes."""
        queue, content_type = self._queues[body[0] % len(self._queues)]
        body = body[1:]
        request_id = ""
        if queue == REQUESTS_QUEUE:
            try:
                request = codec.decode(body, content_type)
            except PermanentError:
                pass
            else:
                if isinstance(request, Request):
                    request_id = request.request_id
                    if request.sampling.max_tokens > MAX_TOKENS:
                        return
        self.rig.front.publish([Outgoing(queue, body, content_type=content_type)]).wait(0.0)
        for _ in range(MAX_TURNS):
            self.rig.turn()
            if not self._is_busy():
                break
        else:
            raise AssertionError(f"not settled: {self.rig.queued()}")
        assert len(self.rig.take_deliveries(DEAD_QUEUE)) <= 1
        if request_id:
            assert len(self.rig.final_events(request_id)) == 1, "a request without its end"

    def _is_busy(self) -> bool:
        return (
            self.rig.num_steps() > 0
            or self.rig.num_messages(REQUESTS_QUEUE) > 0
            or any(worker.num_pending for worker in self._workers)
            or self._scheduler.num_in_flight > 0
        )


@cache
def pipeline() -> Pipeline:
    return Pipeline()


def one_input(body: bytes) -> None:
    if body:
        pipeline().feed(body)


def seeds() -> dict[str, bytes]:
    """Every kind of message in every queue, and steps of the request that is on record."""
    rig, plan = pipeline().rig, pipeline().plan
    step = first_step(plan, rig.layout, epoch=0)
    frames = {name: codec.encode(message) for name, message in EXAMPLES.items()}
    frames |= {
        "known": codec.encode(step),
        "known.later": codec.encode(replace(step, position=2)),
        "known.epoch": codec.encode(replace(step, epoch=3)),
        "short": codec.encode(
            Request("r-short", token_ids=(5, 6), sampling=replace(GREEDY, max_tokens=2))
        ),
    }
    named = {
        f"{place}.{name}": bytes([place]) + body
        for name, body in frames.items()
        for place in (0, 2, 3)
    }
    named["1.json"] = b'\x01{"request_id":"r-j","prompt":"hello","sampling":{"max_tokens":2}}'
    return named
