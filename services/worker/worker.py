"""Turns deliveries of layer-group steps into deliveries for the next group.

One turn: take -> decode -> batch -> compute -> remember -> publish -> settle. Owns the order of
those; knows no pika, no redis and no C. Everything it holds can be lost: the broker redelivers the
steps and the store holds the rows.

B sequences in a batch, R rows in it, D hidden_size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
import structlog

from services.worker.batch import Pending, Slice, plan_batch
from services.worker.compute import forward_batch
from services.worker.faults import Faults, Point
from services.worker.inbox import Inbox
from services.worker.limits import WorkerLimits
from services.worker.remember import write_rows
from services.worker.sequences import SequencePool
from services.worker.steps import next_group_step
from services.worker.tokens import Ended, GoOn, OutOfOrder, sample_and_commit
from services.worker.verdict import step_problem
from shared import codec
from shared.backoff import Backoff
from shared.broker.base import Broker, Confirm, Outgoing
from shared.errors import KernelError, KvMissing, StoreDamaged, TransientError
from shared.messages import FinishReason, Step
from shared.model.config import ModelConfig
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.topology import Layout, group_queue

log = structlog.get_logger()

FloatRows = npt.NDArray[np.float32]


class Worker:
    """Serves the layer groups in `layer_groups`, by group number.

    `kv_pages` None is the embedded mode: no other process could take over, so rows stay local.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        config: ModelConfig,
        layer_groups: Mapping[int, LayerGroup],
        broker: Broker,
        ledger: Ledger,
        kv_pages: KvPages | None,
        limits: WorkerLimits = WorkerLimits(),
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_steps_done = 0
        self.last_step_unix_ms = 0
        self._layout = layout
        self._config = config
        self._layer_groups: dict[int, LayerGroup] = {}
        self._group_order: list[int] = []  # the one that waits longest for a turn first
        self._broker = broker
        self._ledger = ledger
        self._kv_pages = kv_pages
        self._limits = limits
        self._faults = faults
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._pool = SequencePool(self._new_cache, kv_pages, max_bytes=limits.kv_cache_bytes)
        self._inbox = Inbox(
            broker,
            problem=self._problem,
            is_repeat=self._is_repeat,
            max_pending=2 * limits.max_batch_sequences,
        )
        for group, layer_group in layer_groups.items():
            self.serve_group(group, layer_group)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(sorted(self._layer_groups))

    def serve_group(self, group: int, layer_group: LayerGroup) -> None:
        """Serve one more group from now on."""
        self._layer_groups[group] = layer_group
        self._group_order.append(group)
        self._broker.consume(self._queue(group), prefetch=self._limits.prefetch)

    def turn(self, timeout_s: float) -> int:
        """Take what has arrived, run one batch, settle it. Returns the number of steps settled.

        Waits at most `timeout_s` for a first delivery. Transient failures hand the batch back to
        the broker after a back-off; nothing is raised for them.
        """
        self._inbox.receive(timeout_s, now_s=self._clock())
        slices = plan_batch(
            self._inbox.items(),
            now_s=self._clock(),
            max_rows=self._limits.max_batch_rows,
            max_sequences=self._limits.max_batch_sequences,
            group_order=self._group_order,
        )
        if not slices:
            return 0
        self._group_order.remove(slices[0].group)
        self._group_order.append(slices[0].group)
        self._reached(Point.RECEIVE, slices)
        try:
            settled = self._run(slices)
        except TransientError as error:
            wait_s = self._backoff.next_s()
            log.warning("batch_handed_back", reason=str(error), wait_ms=round(wait_s * 1e3))
            self._sleep(wait_s)  # before the hand-back, which would bring the batch straight back
            for piece in slices:
                self._inbox.hand_back(piece.pending)
            return 0
        self._backoff.reset()
        return settled

    def hand_back_all(self) -> None:
        """Take nothing more and give back every unsettled delivery; the last act before leaving."""
        for group in self._layer_groups:
            self._broker.cancel(self._queue(group))  # or they would come straight back
        for item in self._inbox.items():
            self._inbox.hand_back(item)

    def _run(self, slices: Sequence[Slice]) -> int:
        slices = self._with_rows_at_hand(slices)
        if not slices:
            return 0
        started_s = self._clock()
        group = slices[0].group
        self._reached(Point.COMPUTE, slices)
        try:
            hidden = forward_batch(self._layer_groups[group], slices, self._cache)  # (R, D)
            settled = self._pass_on(group, slices, hidden)
        except KernelError as error:  # nothing was published yet: sampling comes before
            return self._isolate(slices, error)
        now_s = self._clock()
        log.debug(
            "batch_done",
            group=group,
            sequences=len(slices),
            rows=len(hidden),
            duration_ms=round((now_s - started_s) * 1e3, 3),
        )
        self._pool.trim(now_s=now_s)
        return settled

    def _with_rows_at_hand(self, slices: Sequence[Slice]) -> list[Slice]:
        """The slices whose earlier KV rows are here or could be read; the others are parked."""
        ready = []
        now_s, now_unix_ms = self._clock(), _unix_ms()
        for piece in slices:
            item = piece.pending
            if self._is_repeat(item.step):  # its twin was passed on while it waited
                self._inbox.ack(item)
                continue
            if 0 < item.step.deadline_unix_ms <= now_unix_ms:
                self._fail(item, "the request's deadline has passed")
                continue
            try:
                self._pool.top_up(piece.group, piece.request_id, piece.position, now_s=now_s)
            except KvMissing as error:
                # A step can overtake its predecessor, which another worker of the group still
                # computes: its rows come within one step's time or not at all.
                waited_s = item.park(now_s=now_s, retry_s=self._limits.park_retry_s)
                if waited_s > self._limits.park_limit_s and self._kv_pages is None:
                    self._fail(item, str(error))
                elif waited_s > self._limits.park_limit_s:
                    self._inbox.ack(item)  # the scheduler sends again what the rows came from
                continue
            except (KernelError, StoreDamaged) as error:
                self._fail(item, f"KV rows in the store are damaged: {error}", dead=True)
                continue
            item.parked_since_s = None
            ready.append(piece)
        return ready

    def _isolate(self, slices: Sequence[Slice], error: KernelError) -> int:
        """A batch failed: run its members alone, so that only the culprit's request ends."""
        if len(slices) > 1:
            return sum(self._run([piece]) for piece in slices)
        item = slices[0].pending
        self._fail(item, f"layer group {slices[0].group} cannot compute it: {error}", dead=True)
        return 1

    def _pass_on(self, group: int, slices: Sequence[Slice], hidden: FloatRows) -> int:
        ends = np.cumsum([piece.num_rows for piece in slices])
        confirm: Confirm | None
        if group == self._layout.last_group:
            self._write_rows(slices)
            following = self._commit_tokens(slices, hidden[ends - 1])
            self._reached(Point.COMMIT, slices)
            confirm = self._publish(following)
            self._reached(Point.PUBLISH, slices)
        else:
            confirm = self._publish(
                [
                    next_group_step(piece, hidden[end - piece.num_rows : end])
                    for piece, end in zip(slices, ends, strict=True)
                ]
            )
            self._reached(Point.PUBLISH, slices)
            self._write_rows(slices)  # beside the publish: both end before the ack
        if confirm is not None:
            confirm.wait(self._limits.confirm_timeout_s)
        self._reached(Point.CONFIRM, slices)
        return sum(self._settle(group, piece) for piece in slices)

    def _write_rows(self, slices: Sequence[Slice]) -> None:
        if self._kv_pages is not None:
            write_rows(slices, self._cache, self._kv_pages, self._ledger)
        self._reached(Point.WRITE, slices)

    def _commit_tokens(self, slices: Sequence[Slice], last_rows: FloatRows) -> list[Step]:
        """Commit a token for every slice that ends its step; returns the decode steps to send.

        `last_rows` (B, D) holds the last hidden row of each slice.
        """
        ends = [i for i, p in enumerate(slices) if p.completes and p.pending.step.sample]
        items = [slices[i].pending for i in ends]
        outcomes = sample_and_commit(
            [item.step for item in items],
            last_rows[ends],
            self._layer_groups[self._layout.last_group],
            self._ledger,
        )
        following = []
        for item, outcome in zip(items, outcomes, strict=True):
            match outcome:
                case GoOn(step=step):
                    following.append(step)
                case Ended():
                    self._pool.drop(item.step.request_id, self._layer_groups)
                case OutOfOrder(reason=reason):
                    self._fail(item, reason)
                case _:
                    assert_never(outcome)
        return following

    def _publish(self, steps: Sequence[Step]) -> Confirm | None:
        if not steps:
            return None
        return self._broker.publish(
            [Outgoing(self._queue(step.group), codec.encode(step)) for step in steps]
        )

    def _settle(self, group: int, piece: Slice) -> int:
        piece.pending.done = piece.start + piece.num_rows
        if not piece.completes:
            return 0
        step = piece.pending.step
        if state := self._pool.peek(group, step.request_id):
            state.note_forwarded(epoch=step.epoch, end_position=step.position + step.num_positions)
        self._inbox.ack(piece.pending)  # a crash above means redelivery, not loss
        self.num_steps_done += 1
        self.last_step_unix_ms = _unix_ms()
        return 1

    def _fail(self, item: Pending, reason: str, *, dead: bool = False) -> None:
        """End the request with a named error; `dead` keeps its message for inspection."""
        step = item.step
        try:
            ended_now = self._ledger.finish(step.request_id, FinishReason.ERROR, reason)
        except StoreDamaged:  # its record is not one any more; the scheduler buries it
            ended_now = False
        log.log(
            logging.ERROR if ended_now else logging.DEBUG,
            "request_failed" if ended_now else "late_step_dropped",
            request_id=step.request_id,
            group=step.group,
            position=step.position,
            reason=reason,
        )
        self._pool.drop(step.request_id, self._layer_groups)
        if dead:
            self._inbox.dead_letter(item)
        else:
            self._inbox.ack(item)

    def _problem(self, step: Step) -> str:
        return step_problem(
            step, layout=self._layout, config=self._config, groups=self._layer_groups
        )

    def _is_repeat(self, step: Step) -> bool:
        state = self._pool.peek(step.group, step.request_id)
        end_position = step.position + step.num_positions
        return state is not None and state.is_repeat(epoch=step.epoch, end_position=end_position)

    def _new_cache(self, group: int) -> SequenceCache:
        return self._layer_groups[group].new_cache()

    def _cache(self, piece: Slice) -> SequenceCache:
        return self._pool.get(piece.group, piece.request_id, now_s=self._clock()).cache

    def _reached(self, point: Point, slices: Sequence[Slice]) -> None:
        if self._faults is not None:
            ids = {piece.request_id for piece in slices}
            self._faults.hit(point, slices[0].group, ids)

    def _queue(self, group: int) -> str:
        return group_queue(self._layout.model_id, self._layout.layout_id, group)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
