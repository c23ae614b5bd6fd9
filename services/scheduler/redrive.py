"""Watches the requests that run and drives on those whose step was lost.

Owns their epochs and the one message that starts or revives a request. What to do is decided by
`shared.policy`; this does it. Knows no request message and no reply.

G layer groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from services.scheduler.admission import first_step
from services.scheduler.held import Held
from services.scheduler.limits import SchedulerLimits
from services.scheduler.prefixes import Prefixes
from services.scheduler.records import plan_of
from shared import codec, policy
from shared.broker.base import Broker, Outgoing
from shared.errors import PermanentError, StoreDamaged
from shared.messages import FinishReason
from shared.policy import End, Pace, Redrive, Running, Surroundings, Wait
from shared.silence import Silence
from shared.store.kv_pages import KvPages
from shared.store.ledger_base import RequestLedger
from shared.store.ledger_types import LedgerRecord, RequestState
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.topology import Layout, group_queue, inbox_queue

log = structlog.get_logger()

# Two schedulers that revive a request at once must not choose the same epoch.
_EPOCH_STRIDE = 1 << 16


class Redriver:
    """`kv_pages` None is the embedded mode: rows cannot be counted, and nothing is ever lost."""

    def __init__(
        self,
        *,
        layout: Layout,
        broker: Broker,
        ledger: RequestLedger,
        kv_pages: KvPages | None,
        prefixes: Prefixes,
        peers: Callable[[], Sequence[WorkerInfo]],
        silence: Silence,
        limits: SchedulerLimits,
        rng: random.Random,
    ) -> None:
        self.num_redrives = 0
        self._peers = peers
        self._silence = silence
        self._layout = layout
        self._broker = broker
        self._ledger = ledger
        self._kv_pages = kv_pages
        self._prefixes = prefixes
        self._limits = limits
        self._rng = rng
        self._pace = Pace()
        self._looked_s: float | None = None

    def watch(self, record: LedgerRecord, *, is_new: bool, now_s: float) -> Running:
        """What is known of a request that runs, from its record and its rows.

        One that `is_new` has none yet. Raises `StoreUnavailable`.
        """
        running = Running(
            epoch=record.epoch,
            committed_position=max(record.committed_position, record.num_prompt_tokens - 1),
            moved_s=now_s,
            started_s=now_s,
            deadline_unix_ms=record.deadline_unix_ms,
            has_moved=record.num_generated > 0,
        )
        if self._kv_pages is None or running.has_moved:
            return running
        rows = [0] * self._layout.num_groups
        if not is_new:
            rows = self._kv_pages.rows_by_group(record.request_id, record.num_prompt_tokens)
        return replace(running, rows=tuple(rows), most_rows=sum(rows), has_moved=any(rows))

    def start(self, request_id: str, held: Held, *, now_s: float) -> None:
        """Send the prompt, but for what it shares with others and every group has.

        A request that may have been started before gets a new epoch.

        Raises `TransientError`; calling it again is then right. Raises `PermanentError` for a
        record that cannot be read.
        """
        running = held.running
        assert running is not None, "only what runs is started"
        epoch = running.epoch if held.is_new else self._advance(request_id, held)
        held.is_new = False  # whatever becomes of the publish, its fate may stay unknown
        if epoch is None:
            return
        record = self._record(request_id)
        position = held.num_cached = self._prefixes.attach(record)
        if position != record.num_cached:
            self._ledger.note_cached(request_id, position)
        self._send(record, epoch, position, worker_id="")
        rows = (position,) * self._layout.num_groups
        held.running = replace(
            running,
            epoch=epoch,
            moved_s=now_s,
            started_s=now_s,
            rows=None if running.rows is None else rows,
            most_rows=max(running.most_rows, sum(rows)),
        )

    def look(
        self,
        in_flight: Mapping[str, Held],
        states: Mapping[str, RequestState],
        around: Surroundings,
    ) -> dict[str, str]:
        """Drive on, or end, every request that needs it.

        Returns those whose record is damaged, with the reason. Raises `TransientError`.
        """
        excused_s = self._excused_s(around)
        running = {
            request_id: held
            for request_id, held in in_flight.items()
            if held.running is not None
            and request_id in states
            and states[request_id].finish_reason is None
        }
        for request_id, held in running.items():
            self._note_state(held, states[request_id], excused_s, around)
            assert held.running is not None
            end = policy.decide_end(held.running, around, self._limits.redrive)
            if isinstance(end, End):
                self._ledger.finish(request_id, FinishReason.ERROR, end.reason)
        if self._kv_pages is None or not self._broker.connected():
            return {}
        damaged = {}
        for request_id, held in self._still(running, around):
            try:
                self._decide(request_id, held, self._kv_pages, around)
            except PermanentError as error:
                damaged[request_id] = str(error)
        return damaged

    def _note_state(
        self, held: Held, state: RequestState, excused_s: float, around: Surroundings
    ) -> None:
        assert held.running is not None
        before = held.running.excused(excused_s, now_s=around.now_s)
        held.running = before.committed(
            epoch=state.epoch, committed_position=state.committed_position, now_s=around.now_s
        )
        self._pace.note(before, held.running)
        if held.running.has_moved:
            held.is_waiting = False  # another scheduler has let it in

    def _excused_s(self, around: Surroundings) -> float:
        """Seconds since the last look in which nobody could move, or that were not watched."""
        looked_s, self._looked_s = self._looked_s, around.now_s
        if looked_s is None:
            return 0.0
        passed_s = around.now_s - looked_s
        is_idle = around.uncovered_group is not None or not self._broker.connected()
        return passed_s if is_idle or passed_s > self._limits.blind_after_s else 0.0

    def _still(self, running: Mapping[str, Held], around: Surroundings) -> list[tuple[str, Held]]:
        """Those that have stood still for a while, the longest first, no more than a turn bears."""
        still = []
        for request_id, held in running.items():
            assert held.running is not None
            if held.is_waiting or around.now_s < held.next_count_s:
                continue
            typical_s = self._typical_s(held.running)
            if policy.wants_count(held.running, around, typical_s, self._limits.redrive):
                still.append((held.running.moved_s, request_id, held))
        still.sort(key=lambda item: item[0])
        return [(i, held) for _, i, held in still[: self._limits.max_counts_a_poll]]

    def _decide(self, request_id: str, held: Held, kv_pages: KvPages, around: Surroundings) -> None:
        assert held.running is not None
        before = held.running
        rows = kv_pages.rows_by_group(request_id, before.committed_position + 1)
        running = held.running = before.counted(rows, now_s=around.now_s)
        self._pace.note(before, running)
        typical_s, limits = self._typical_s(running), self._limits.redrive
        # A quarter of its patience after half of it: the third count may find it lost.
        held.next_count_s = around.now_s + policy.patience_s(running, typical_s, limits) / 4
        match policy.decide(running, around, typical_s, limits):
            case Wait():
                pass
            case End(reason=reason):
                if self._ledger.finish(request_id, FinishReason.ERROR, reason):
                    log.error("request_given_up", request_id=request_id, reason=reason)
            case Redrive(position=position):
                self._redrive(request_id, held, position, around)

    def _redrive(self, request_id: str, held: Held, position: int, around: Surroundings) -> None:
        running = held.running
        assert running is not None
        epoch = self._advance(request_id, held)
        if epoch is None:
            return
        held.num_cached = min(held.num_cached, position)
        if self._kv_pages is not None:
            self._kv_pages.keep_shared(request_id, position)
        held.sent_to = self._other_worker(held.sent_to, now_s=around.now_s)
        self._send(self._record(request_id), epoch, position, worker_id=held.sent_to)
        held.running = running.redriven(
            epoch=epoch, now_s=around.now_s, jitter=self._rng.uniform(0.75, 1.0)
        )
        held.next_count_s = around.now_s
        self.num_redrives += 1
        log.warning(
            "request_redriven",
            request_id=request_id,
            epoch=epoch,
            position=position,
            committed=running.committed_position,
            rows=running.rows,
            still_ms=round((around.now_s - running.moved_s) * 1e3),
            num_redrives=running.num_redrives + 1,
        )

    def _advance(self, request_id: str, held: Held) -> int | None:
        """Fence off what runs of a request. None when it ended, or another scheduler was faster."""
        assert held.running is not None
        expected = held.running.epoch
        new = expected + self._rng.randint(1, _EPOCH_STRIDE)
        if self._ledger.advance_epoch(request_id, expected, new) != new:
            return None
        held.running = replace(held.running, epoch=new)
        return new

    def _other_worker(self, before: str, *, now_s: float) -> str:
        """A live worker of group 0, another than the last time; "" when none tells of itself.

        The group's queue would hand steps to one that is frozen until the broker misses it.
        """
        able = [
            peer.worker_id
            for peer in self._peers()
            if peer.state is WorkerState.SERVING and 0 in peer.groups
        ]
        able = [i for i in able if i != before] or able
        able = [i for i in able if not self._silence.is_silent(i, now_s=now_s)] or able
        return self._rng.choice(able or [""])

    def _record(self, request_id: str) -> LedgerRecord:
        """Read after the epoch was advanced: nothing is committed in between any more."""
        record = self._ledger.get(request_id)
        if record is None:
            raise StoreDamaged(f"the store has lost the record of request {request_id}")
        return record

    def _send(self, record: LedgerRecord, epoch: int, position: int, *, worker_id: str) -> None:
        """One step to group 0 with all tokens from `position` on; its last row is sampled."""
        request_id = record.request_id
        generated = self._ledger.tokens(request_id) if record.num_generated else []
        if len(generated) != record.num_generated:
            raise StoreDamaged(
                f"the store holds {len(generated)} of the {record.num_generated} tokens of "
                f"request {request_id}"
            )
        step = first_step(
            plan_of(record), self._layout, epoch=epoch, position=position, generated=generated
        )
        layout = self._layout
        queue, instead = group_queue(layout.model_id, layout.layout_id, 0), ""
        if worker_id:
            step = replace(step, route=(worker_id,))
            queue, instead = inbox_queue(worker_id, 0), queue
        confirm = self._broker.publish([Outgoing(queue, codec.encode(step), instead=instead)])
        confirm.wait(self._limits.confirm_timeout_s)

    def _typical_s(self, running: Running) -> float:
        return self._pace.typical_s(running, self._limits.redrive.unknown_pace_s)
