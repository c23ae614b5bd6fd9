"""Turns deliveries of layer-group steps into deliveries for the next group.

One turn: take -> decode -> batch -> compute -> remember -> publish -> settle. Owns the order of
those; knows no pika, no redis and no C. Everything it holds can be lost: the broker redelivers the
steps and the store holds the rows. Longer than other modules: it makes the parts that share a
turn, each of which is a module of its own.

B sequences in a batch, R rows in it, D hidden_size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from services.worker.batch import Pending, Slice, max_slice_rows, plan_batch
from services.worker.compute import forward_batch
from services.worker.endings import Endings
from services.worker.faults import Faults, Point, reached
from services.worker.inbox import Inbox
from services.worker.limits import MIN_KV_CACHE_BYTES, WorkerLimits
from services.worker.output import Output
from services.worker.pace import Pace
from services.worker.readiness import Readiness, unix_ms
from services.worker.sender import Sender
from services.worker.sequences import SequencePool
from services.worker.shaping import MakeProcessors, processors_of
from services.worker.stages import COMPUTE, PREPARE, SETTLE, Stages
from services.worker.stays import Stays
from services.worker.suspects import Suspects
from services.worker.verdict import step_problem
from services.worker.watchdog import Watchdog
from shared.backoff import Backoff
from shared.broker.base import Broker
from shared.errors import KernelError, RequestError, TransientError
from shared.messages import Step
from shared.model.config import ModelConfig
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup
from shared.model.local_prefixes import LocalPrefixes
from shared.quarantine import Quarantine
from shared.store.attempts import Attempts
from shared.store.kv_pages import KvPages
from shared.store.ledger_base import RequestLedger
from shared.store.presence_types import WorkerInfo
from shared.store.shared_clock import SharedClock
from shared.topology import Layout, group_queue, inbox_queue, inbox_spec, is_inbox
from shared.wire import row_bytes

log = structlog.get_logger()

FloatRows = npt.NDArray[np.float32]

TURN_WEIGHT = 0.1  # of the newest turn in the mean


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker needs to be one of several: its name, the others, and marks on suspects.

    `read_peers` tells of nobody who died `peers_ttl_s` ago or earlier.
    """

    worker_id: str
    read_peers: Callable[[], Sequence[WorkerInfo]]
    attempts: Attempts
    peers_ttl_s: float = 5.0


class Worker:
    """Serves the layer groups in `layer_groups`, by group number.

    `kv_pages` None is the embedded mode: no other process could take over, so rows stay local, and
    `prefixes` has those that requests share.
    Without a `membership` there are no routes and no inbox: steps go by their group's queue.
    `make_processors` says what a request that asks for it has done to its logits.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        config: ModelConfig,
        layer_groups: Mapping[int, LayerGroup],
        broker: Broker,
        ledger: RequestLedger,
        kv_pages: KvPages | None,
        prefixes: LocalPrefixes | None = None,
        membership: Membership | None = None,
        limits: WorkerLimits = WorkerLimits(),
        faults: Faults | None = None,
        watchdog: Watchdog | None = None,
        make_processors: MakeProcessors = processors_of,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_steps_done = 0
        self.quarantine = Quarantine()
        self.stages = Stages()
        self.turn_s = 0.0  # of late, exponentially smoothed
        self.last_step_unix_ms = 0
        self._layout = layout
        self._config = config
        self._layer_groups: dict[int, LayerGroup] = {}
        # By group, what the KV cache holds. Rows that are nowhere else stay, whatever the bound.
        self._max_positions: dict[int, int] | None = None if kv_pages is None else {}
        self._running: Sequence[Slice] = ()  # in this turn
        self._group_order: list[int] = []  # the one that waits longest for a turn first
        self._broker = broker
        self._ledger = ledger
        self._limits = limits
        self._max_slice_rows = max_slice_rows(row_bytes(layout.wire, config.hidden_size))
        self._faults = faults
        self._computing: Callable[[], AbstractContextManager[None]] = (
            watchdog.computing if watchdog else nullcontext
        )
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._pool = SequencePool(
            self._new_cache, kv_pages, max_bytes=limits.kv_cache_bytes, prefixes=prefixes
        )
        self._worker_id = membership.worker_id if membership else ""
        sender = Sender(
            broker,
            layout,
            read_peers=membership.read_peers if membership else None,
            clock=clock,
            stages=self.stages,
        )
        self._inbox = Inbox(
            broker,
            problem=self._problem,
            is_repeat=self._is_repeat,
            is_redriven=self._is_redriven,
            doubt=sender.doubt,
            can_go_on=self._can_go_on,
            max_pending=2 * limits.max_batch_sequences,
            worker_id=self._worker_id,
            confirm_timeout_s=limits.confirm_timeout_s,
        )
        self._suspects = Suspects(
            membership.attempts if membership else None,
            ledger,
            worker_id=self._worker_id,
            max_attempts=limits.max_attempts,
            patience_s=membership.peers_ttl_s + 1.0 if membership else 0.0,
            read_peers=membership.read_peers if membership else lambda: (),
            clock=clock,
            unix_ms=unix_ms,
        )
        self._suspects_first = True
        self._pace = Pace()
        self._endings = Endings(
            self._inbox,
            ledger,
            self._suspects,
            forget=lambda request_id: self._pool.drop(request_id, self._layer_groups),
            clock=clock,
        )
        self._readiness = Readiness(
            pool=self._pool,
            inbox=self._inbox,
            suspects=self._suspects,
            endings=self._endings,
            limits=limits,
            is_repeat=self._is_repeat,
            embedded=kv_pages is None,
            clock=clock,
            time_of_day=SharedClock(ledger),
        )
        self._prefetch: dict[str, int] = {}  # by queue
        self._stays = Stays(
            self._layer_groups,
            worker_id=self._worker_id,
            is_alone=kv_pages is None,
            num_staying=self._inbox.num_staying,
            room=lambda queue: self._prefetch.get(queue, 0) // 2,
        )
        self._stays.is_leaving = not limits.keeps_steps
        self._output = Output(
            layout=layout,
            layer_groups=self._layer_groups,
            sender=sender,
            ledger=ledger,
            kv_pages=kv_pages,
            pool=self._pool,
            inbox=self._inbox,
            endings=self._endings,
            cache_of=self._cache,
            worker_id=self._worker_id,
            confirm_timeout_s=limits.confirm_timeout_s,
            faults=faults,
            stages=self.stages,
            stays=self._stays,
            make_processors=make_processors,
        )
        for group, layer_group in layer_groups.items():
            self.serve_group(group, layer_group)

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(sorted(self._layer_groups))

    @property
    def kv_cache_bytes(self) -> int:
        return self._pool.max_bytes

    @property
    def num_pending(self) -> int:
        """Steps that were received and are not settled."""
        return len(self._inbox)

    @property
    def num_waiting(self) -> int:
        """Of those the steps that came from outside: others are done with every turn."""
        return self._inbox.num_waiting

    def num_active(self, within_s: float = 2.0) -> int:
        """Requests that had a turn lately."""
        return self._pool.num_active(since_s=self._clock() - within_s)

    def reserve(self, num_bytes: int) -> None:
        """Give memory of the KV cache to something else, for good; may be called within a turn.

        Raises `RequestError` when so little would be left that requests could not run.
        """
        if self._max_positions is None:
            return
        left_bytes = self._pool.max_bytes - num_bytes
        if left_bytes < MIN_KV_CACHE_BYTES:
            raise RequestError(
                f"the worker has no {num_bytes} bytes to spare beside its rows: --memory is small",
                remedy="give workers more: cellpipe worker --memory",
            )
        for group, max_positions in self._max_positions.items():
            self._max_positions[group] = max_positions * left_bytes // self._pool.max_bytes
        self._pool.max_bytes = left_bytes
        self._pool.make_room([(p.group, p.request_id, p.end_position) for p in self._running])

    def serve_group(self, group: int, layer_group: LayerGroup) -> None:
        """Serve one more group from now on."""
        self._layer_groups[group] = layer_group
        self._group_order.append(group)
        if self._max_positions is not None:
            row_bytes = layer_group.new_cache().row_bytes
            self._max_positions[group] = self._pool.max_bytes // row_bytes
        self._consume(group)

    def drop_group(self, group: int) -> None:
        """Serve a group no more: give back its steps and free its weights and caches."""
        self._stop_consuming(group)
        self._hear()
        self._give_back([item for item in self._inbox if item.step.group == group])
        self._pool.drop_group(group)
        self._group_order.remove(group)
        del self._layer_groups[group]

    def stop_consuming(self) -> None:
        """Take nothing more; what was received is worked off by further turns."""
        self._stays.is_leaving = True
        for group in self._layer_groups:
            self._stop_consuming(group)

    def resume(self) -> None:
        """Consume again, after `hand_back_all`."""
        self._stays.is_leaving = not self._limits.keeps_steps
        for group in self._layer_groups:
            self._consume(group)

    def hand_back_all(self) -> None:
        """Take nothing more and give back every unsettled delivery; the last act before leaving."""
        self.stop_consuming()  # or they would come straight back
        self._hear()
        self._give_back(self._inbox.items())

    def _consume(self, group: int) -> None:
        if self._worker_id:
            ttl_ms = self._limits.inbox_ttl_ms
            self._broker.declare([inbox_spec(self._layout, self._worker_id, group, ttl_ms=ttl_ms)])
        for queue in self._queues(group):
            prefetch = self._limits.prefetch
            if group == 0 and is_inbox(queue):
                prefetch = self._limits.token_prefetch
            self._prefetch[queue] = prefetch
            self._broker.consume(queue, prefetch=prefetch)

    def turn(self, timeout_s: float) -> int:
        """Take what has arrived, run one batch, settle it. Returns the number of steps settled.

        Waits at most `timeout_s` for a first delivery. Transient failures hand the batch back to
        the broker after a back-off; nothing is raised for them.
        """
        self._inbox.receive(timeout_s, now_s=self._clock())
        now_s, max_rows = self._clock(), self._limits.max_batch_rows
        slices = plan_batch(
            self._inbox,
            now_s=now_s,
            max_rows=max_rows,
            max_slice_rows=self._max_slice_rows,
            max_prefill_rows=self._pace.prefill_rows(self._inbox, now_s=now_s, max_rows=max_rows),
            max_sequences=self._limits.max_batch_sequences,
            max_positions=self._max_positions,
            max_batch_steps=self._pace.batch_steps(self._inbox, now_s=now_s),
            group_order=self._group_order,
            suspects_first=self._suspects_first,
        )
        self._suspects_first = not self._suspects_first
        if not slices:
            self._hear()
            return 0
        self._group_order.remove(slices[0].group)
        self._group_order.append(slices[0].group)
        reached(self._faults, Point.RECEIVE, slices)
        try:
            settled = self._run(slices)
        except TransientError as error:
            wait_s = self._backoff.next_s()
            log.warning("batch_handed_back", reason=str(error), wait_ms=round(wait_s * 1e3))
            self._sleep(wait_s)  # before the hand-back, which would bring the batch straight back
            self._give_back([piece.pending for piece in slices])
            return 0
        self._backoff.reset()
        return settled

    def _stop_consuming(self, group: int) -> None:
        for queue in self._queues(group):
            self._broker.cancel(queue)

    def _give_back(self, items: Sequence[Pending]) -> None:
        for item in items:
            self._suspects.outlived(item)
        self._inbox.hand_back(items)

    def _run(self, slices: Sequence[Slice]) -> int:
        self.stages.begin()
        self._pool.make_room([(p.group, p.request_id, p.end_position) for p in slices])
        slices = self._readiness.ready(slices)
        self.stages.lap(PREPARE)
        self._running = slices
        if not slices:
            return 0
        started_s = self._clock()
        group = slices[0].group
        try:
            with self._computing():
                reached(self._faults, Point.COMPUTE, slices)
                hidden = forward_batch(  # (R, D)
                    self._layer_groups[group], slices, self._cache, self._layout.wire
                )
            self.stages.lap(COMPUTE)
            self._note_drafts(slices)
            self._output.hear()
            slices, hidden = self._still_here(slices, hidden)
            if not slices:
                return 0
            has_time = len(self._inbox) == 1 and slices[0].completes
            staying = self._output.pass_on(slices, hidden, has_time=has_time)
        except KernelError as error:  # nothing was published yet: sampling comes before
            return self._isolate(slices, error)
        settled = sum(self._settle(group, piece, staying.get(piece)) for piece in slices)
        self.stages.lap(SETTLE)
        self.stages.end(slices)
        now_s = self._clock()
        self.turn_s += TURN_WEIGHT * (now_s - started_s - self.turn_s)
        self._pace.note(slices, now_s - started_s)
        log.debug(
            "batch_done",
            group=group,
            sequences=len(slices),
            rows=len(hidden),
            duration_ms=round((now_s - started_s) * 1e3, 3),
        )
        self._pool.trim(now_s=now_s)
        return settled

    def _isolate(self, slices: Sequence[Slice], error: KernelError) -> int:
        """A batch failed: run its members alone, so that only the culprit's request ends."""
        if len(slices) > 1:
            return sum(self._run([piece]) for piece in slices)
        if slices[0].draft:  # a guess that cannot be computed is only a bad guess
            return self._run([slices[0].without_draft()])
        item = slices[0].pending
        self.quarantine.failed(item.step.request_id)
        self._endings.fail(
            item, f"layer group {slices[0].group} cannot compute it: {error}", dead=True
        )
        return 1

    def _still_here(
        self, slices: Sequence[Slice], hidden: FloatRows
    ) -> tuple[Sequence[Slice], FloatRows]:
        """The slices that were not settled while they were computed, and their rows (R, D).

        A step of another epoch waits for its next turn if its request's state went with an old one.
        """
        here = [
            piece.pending in self._inbox
            and self._pool.peek(piece.group, piece.request_id) is not None
            for piece in slices
        ]
        if all(here):
            return slices, hidden
        rows = np.repeat(here, [piece.num_rows for piece in slices])
        return [piece for piece, is_here in zip(slices, here, strict=True) if is_here], hidden[rows]

    def _hear(self) -> None:
        try:
            self._output.hear()
        except TransientError as error:
            log.warning("steps_handed_back", reason=str(error))

    def _note_drafts(self, slices: Sequence[Slice]) -> None:
        for piece in slices:
            if state := self._pool.peek(piece.group, piece.request_id):
                state.draft = piece.draft

    def _settle(self, group: int, piece: Slice, staying: Step | None) -> int:
        if piece.pending.is_early:
            piece.pending.is_early = False
            return 0
        piece.pending.done = piece.start + piece.num_rows
        if not piece.completes:
            return 0
        step = piece.pending.step
        if staying is not None:
            self._inbox.keep(piece.pending, staying)
        else:
            if state := self._pool.peek(group, step.request_id):
                state.note_forwarded(epoch=step.epoch, end_position=step.end_position)
            self._suspects.done(piece.pending)
            self._inbox.ack(piece.pending)  # a crash above means redelivery, not loss
        self.num_steps_done += 1
        self.quarantine.succeeded()
        self.last_step_unix_ms = unix_ms()
        return 1

    def _problem(self, step: Step) -> str:
        return step_problem(
            step, layout=self._layout, config=self._config, groups=self._layer_groups
        )

    def _is_repeat(self, step: Step) -> bool:
        state = self._pool.peek(step.group, step.request_id)
        return state is not None and state.is_repeat(
            epoch=step.epoch, end_position=step.end_position
        )

    def _is_redriven(self, step: Step) -> bool:
        state = self._pool.peek(step.group, step.request_id)
        return step.epoch > 0 and (state is None or state.epoch != step.epoch)

    def _can_go_on(self, step: Step) -> bool:
        """Only one group keeps rows back; and what was accepted of a draft is in a cache alone."""
        return self._layout.num_groups > 1 and not step.accepted

    def _new_cache(self, group: int) -> SequenceCache:
        return self._layer_groups[group].new_cache()

    def _cache(self, piece: Slice) -> SequenceCache:
        return self._pool.get(piece.group, piece.request_id, now_s=self._clock()).cache

    def _queues(self, group: int) -> list[str]:
        shared = group_queue(self._layout.model_id, self._layout.layout_id, group)
        return [inbox_queue(self._worker_id, group), shared] if self._worker_id else [shared]
