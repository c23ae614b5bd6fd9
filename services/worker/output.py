"""Passes on what a batch computed: rows to the store, tokens to the ledger, steps to the queues.

Owns the order of those: what follows is in its queue, and the rows are in the store, before the
caller forgets the deliveries. Knows no delivery being settled and no forward pass. Longer than
other modules: the order of all that a turn leaves behind is told in one place.

B sequences in a batch, R rows in it, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import assert_never

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.compute import CacheOf
from services.worker.endings import Endings
from services.worker.faults import Faults, Point, reached
from services.worker.inbox import Inbox
from services.worker.remember import WaitRows, fills_page, first_row, start_rows
from services.worker.sender import Sender
from services.worker.sequences import SequencePool
from services.worker.shaping import MakeProcessors, Shaping
from services.worker.speculation import Speculation
from services.worker.stages import COMPUTE, CONFIRM, REDIS, Stages
from services.worker.stays import Stays
from services.worker.steps import following_step, known_alone, next_group_step, routed
from services.worker.tokens import Behind, Drawn, Early, Ended, GoOn, Outcome, OutOfOrder
from shared.broker.base import Confirm
from shared.errors import DecodeError, StoreDamaged, TransientError
from shared.messages import Step
from shared.model.layer_group import LayerGroup
from shared.router import worker_of
from shared.store.kv_pages import KvPages
from shared.store.ledger_base import RequestLedger
from shared.store.ledger_types import TokenEvent
from shared.topology import Layout
from shared.wire import encode_hidden

FloatRows = npt.NDArray[np.float32]


class Output:
    """The second half of a worker's turn."""

    def __init__(
        self,
        *,
        layout: Layout,
        layer_groups: Mapping[int, LayerGroup],
        sender: Sender,
        ledger: RequestLedger,
        kv_pages: KvPages | None,
        pool: SequencePool,
        inbox: Inbox,
        endings: Endings,
        cache_of: CacheOf,
        worker_id: str,
        confirm_timeout_s: float,
        faults: Faults | None,
        stages: Stages,
        stays: Stays,
        make_processors: MakeProcessors,
    ) -> None:
        self._layout = layout
        self._layer_groups = layer_groups
        self._sender = sender
        self._ledger = ledger
        self._kv_pages = kv_pages
        self._pool = pool
        self._inbox = inbox
        self._endings = endings
        self._cache_of = cache_of
        self._worker_id = worker_id
        self._confirm_timeout_s = confirm_timeout_s
        self._faults = faults
        self._stages = stages
        self._stays = stays
        self._unheard: tuple[Sequence[Slice], Drawn] | None = None
        self._shaping = Shaping(pool, ledger, layout.last_group, make_processors)
        self._speculation = Speculation(pool, ledger, layout.last_group)

    def pass_on(
        self, slices: Sequence[Slice], hidden: FloatRows, *, has_time: bool = False
    ) -> Mapping[Slice, Step]:
        """Store the KV rows of slices of one group, commit their tokens, send what follows.

        `hidden` (R, D) are their output rows. Who `has_time`, since nothing else is to be done,
        leaves the processors to the messages until these have arrived. When it returns all of it
        is in store and queue, but for slices that complete no step: theirs are when the next one's
        are; and for the steps that it returns, which are to stay here, and whose deliveries are not
        to be settled. May be repeated after any error: `KernelError`, which comes before anything
        was sent, and `TransientError`.
        """
        self._stays.begin()
        ends = list(accumulate(piece.num_rows for piece in slices))
        if slices[0].group == self._layout.last_group:
            confirm, staying = self._pass_on_tokens(slices, hidden, ends, has_time=has_time)
        else:
            confirm, staying = self._pass_on_hidden(slices, hidden, ends, has_time=has_time)
        self._wait(slices, confirm)
        self._stages.lap(CONFIRM)
        reached(self._faults, Point.CONFIRM, slices)
        return staying

    def hear(self) -> None:
        """Hear what became of the commits of a turn that left all its steps here.

        A step that does not follow after all is settled: forgotten if its request is over, else
        given back, that is with what it followed from: whoever takes that finds by the record how
        to go on. Raises `TransientError`, when all of them were given back.
        """
        if self._unheard is None:
            return
        (pieces, drawn), self._unheard = self._unheard, None
        items = [self._inbox.staying(p.request_id, epoch=p.pending.step.epoch) for p in pieces]
        try:
            outcomes = drawn.outcomes(self._shaping)
        except TransientError:
            self._inbox.hand_back([item for item in items if item is not None])
            raise
        for piece, item, outcome in zip(pieces, items, outcomes, strict=True):
            match outcome:
                case GoOn(step=step, is_first=True):
                    self._note_on_record(piece, step)
                case Ended():
                    self._pool.drop(piece.request_id, self._layer_groups)
                    if item is not None:
                        self._inbox.ack(item)
                case _ if item is not None:
                    self._inbox.hand_back([item])
        self._stages.lap(CONFIRM)

    def _note_on_record(self, piece: Slice, following: Step) -> None:
        if state := self._pool.peek(piece.group, piece.request_id):
            state.on_record_epoch, state.on_record = following.epoch, following.end_position

    def _pass_on_tokens(
        self,
        slices: Sequence[Slice],
        hidden: FloatRows,
        ends: Sequence[int],
        *,
        has_time: bool,
    ) -> tuple[Confirm | None, Mapping[Slice, Step]]:
        pieces, drawn = self._draw(slices, hidden, ends)
        self._stages.lap(COMPUTE)
        expected = dict(zip(pieces, drawn.expected(), strict=True))
        # Whoever shares a request's full pages at its end is to find them. All other rows can
        # wait until the token is on its way.
        ending = {p for p, outcome in expected.items() if not isinstance(outcome, GoOn)}
        if filling := [piece for piece in slices if piece in ending and fills_page(piece)]:
            self._start_rows(filling)()
            self._stages.lap(REDIS)
        ahead = self._sent_ahead(expected)
        following = {p: self._decode_step(p, outcome, slices) for p, outcome in ahead.items()}
        staying = {p: step for p, step in following.items() if self._may_stay(p, step)}
        confirm = self._sender.publish([s for p, s in following.items() if p not in staying])
        if ahead:
            reached(self._faults, Point.PUBLISH, slices)
        drawn.commit(self._ledger)
        reached(self._faults, Point.COMMIT, slices)
        over: set[str] = set()
        kept_back = self._kept_back(staying)
        if len(kept_back) == len(slices):  # nothing has left, so nobody but us waits for answers
            self._unheard = pieces, drawn
            self._note_kept_back(kept_back)
            return None, staying
        if has_time:
            over = self._finish(slices, pieces, drawn, ahead, staying)
            self._wait(slices, confirm)
            confirm = None
            kept_back &= staying.keys()
        later = ending | kept_back
        written = [p for p in slices if p not in later and p.request_id not in over]
        wait_rows = self._start_rows(written)
        if not has_time:
            over = self._finish(slices, pieces, drawn, ahead, staying)
        if not ahead:
            reached(self._faults, Point.PUBLISH, slices)
        wait_rows(over)
        # Of those that go on or leave after all.
        left = (ending - set(filling)) | (kept_back - staying.keys())
        if late := [p for p in slices if p in left and p.request_id not in over]:
            self._start_rows(late)()
        self._note_kept_back(kept_back & staying.keys())
        return confirm, staying

    def _pass_on_hidden(
        self,
        slices: Sequence[Slice],
        hidden: FloatRows,
        ends: Sequence[int],
        *,
        has_time: bool,
    ) -> tuple[Confirm | None, Mapping[Slice, Step]]:
        encoded = encode_hidden(hidden, self._layout.wire).items()  # (R, ...) each
        following = {
            piece: self._routed(
                piece,
                next_group_step(piece, {n: t[end - piece.num_rows : end] for n, t in encoded}),
            )
            for piece, end in zip(slices, ends, strict=True)
        }
        staying = {p: step for p, step in following.items() if self._stays.may(p, step)}
        confirm = self._sender.publish([s for p, s in following.items() if p not in staying])
        reached(self._faults, Point.PUBLISH, slices)
        if has_time:
            self._wait(slices, confirm)
            confirm = None
        self._stages.lap(CONFIRM)
        self._start_rows(slices)()  # beside the publish: both end before the ack
        self._stages.lap(REDIS)
        return confirm, staying

    def _may_stay(self, piece: Slice, following: Step) -> bool:
        return not fills_page(piece) and self._stays.may(piece, following)

    def _kept_back(self, staying: Mapping[Slice, Step]) -> set[Slice]:
        """Those slices whose rows need not be stored now.

        Those of steps that stay can wait until they fill a page, if no other group has rows of the
        same request that would have to wait too, and while the KV cache has room: rows that are
        nowhere else are not to be evicted.
        """
        if not staying or self._layout.num_groups > 1:
            return set()
        if self._kv_pages is not None and 2 * self._pool.num_bytes > self._pool.max_bytes:
            return set()
        return set(staying)

    def _note_kept_back(self, slices: Iterable[Slice]) -> None:
        for piece in slices:
            state = self._pool.peek(piece.group, piece.request_id)
            if state is not None and state.unstored is None:
                state.unstored = first_row(piece)

    def _wait(self, slices: Sequence[Slice], confirm: Confirm | None) -> None:
        """Wait for what these slices and those before them have sent.

        Where none completes its step, nothing is acked for now: the next slice is computed
        meanwhile, and its turn waits. What goes wrong is then raised there, with the same delivery.
        """
        for piece in slices:
            if piece.pending.unconfirmed is not None:
                piece.pending.unconfirmed.wait(self._confirm_timeout_s)
                piece.pending.unconfirmed = None
        if confirm is None:
            return
        if any(piece.completes for piece in slices):
            confirm.wait(self._confirm_timeout_s)
            return
        for piece in slices:
            piece.pending.unconfirmed = confirm

    def _start_rows(self, slices: Sequence[Slice]) -> WaitRows:
        """Send the rows of slices to the store; what is returned waits until they are there."""
        wait_stored: WaitRows | None = None
        if self._kv_pages is not None and slices:
            wait_stored = start_rows(
                slices, self._cache_of, self._kv_pages, self._ledger, self._first_unstored
            )

        def wait(over: Container[str] = ()) -> None:
            if wait_stored is not None:
                wait_stored(over)
            for piece in slices:
                if state := self._pool.peek(piece.group, piece.request_id):
                    state.unstored = None
            if slices:
                reached(self._faults, Point.WRITE, slices)

        return wait

    def _first_unstored(self, piece: Slice) -> int:
        state = self._pool.peek(piece.group, piece.request_id)
        if state is None or state.unstored is None:
            return first_row(piece)
        return min(state.unstored, first_row(piece))

    def _draw(
        self, slices: Sequence[Slice], hidden: FloatRows, ends: Sequence[int]
    ) -> tuple[list[Slice], Drawn]:
        """Draw the tokens of every slice that ends its step.

        `hidden` (R, D) are the slices' rows, which end before `ends` (B,).
        """
        pieces: list[Slice] = []
        rows: list[int] = []
        for piece, end in zip(slices, ends, strict=True):
            if piece.completes and piece.pending.step.sample:
                pieces.append(piece)
                rows += range(end - 1 - len(piece.draft), end)
        drawn = Drawn(pieces)
        drawn.draw(
            hidden if len(rows) == len(hidden) else hidden[rows],
            self._layer_groups[self._layout.last_group],
            self._shaping,
        )
        return pieces, drawn

    def _sent_ahead(self, expected: Mapping[Slice, Outcome]) -> dict[Slice, GoOn]:
        """What will follow unless the record knows better.

        Only of requests whose tokens before these were put on record from here: a late copy of a
        step would send a copy ahead of each step that follows it, and never die out. Nor once more
        after a look that was too early.
        """
        return {
            piece: outcome
            for piece, outcome in expected.items()
            if isinstance(outcome, GoOn) and self._is_newest(piece)
        }

    def _is_newest(self, piece: Slice) -> bool:
        state, step = self._pool.peek(piece.group, piece.request_id), piece.pending.step
        return (
            state is not None
            and not piece.pending.is_suspect
            and piece.pending.early_since_s is None
            and (state.on_record_epoch, state.on_record) == (step.epoch, step.end_position)
        )

    def _finish(
        self,
        slices: Sequence[Slice],
        pieces: Sequence[Slice],
        drawn: Drawn,
        ahead: Mapping[Slice, GoOn],
        staying: dict[Slice, Step],
    ) -> set[str]:
        """Hear what became of the commits, and send what follows and was not sent `ahead`.

        A step ahead that does not follow after all does no harm: its commit will be refused.
        Of those `staying` only what follows from tokens of this worker is left, for another may be
        ahead; and what was not ahead, and may stay, comes to them. Returns the requests that
        nothing follows for.
        """
        over: set[str] = set()
        late: list[Step] = []
        for piece, outcome in zip(pieces, drawn.outcomes(self._shaping), strict=True):
            item, stays = piece.pending, staying.pop(piece, None)
            match outcome:
                case GoOn(step=step):
                    if outcome.is_first:
                        self._note_on_record(piece, step)
                    is_as_expected = piece in ahead and ahead[piece].token_ids == outcome.token_ids
                    if is_as_expected and (outcome.is_first or stays is None):
                        if stays is not None:
                            staying[piece] = stays
                        continue
                    if stays is None or not is_as_expected:
                        stays = self._decode_step(piece, outcome, slices)
                    if outcome.is_first and self._may_stay(piece, stays):
                        staying[piece] = stays
                    else:
                        late.append(stays)
                case Ended():
                    over.add(piece.request_id)
                    self._pool.drop(item.step.request_id, self._layer_groups)
                case OutOfOrder(reason=reason, code=code):
                    over.add(piece.request_id)
                    self._endings.fail(item, reason, code=code)
                case Early():
                    self._endings.postpone(item)
                case Behind():
                    late += self._caught_up(piece)
                case _:
                    assert_never(outcome)
        if confirm := self._sender.publish(late):
            confirm.wait(self._confirm_timeout_s)
        return over

    def _caught_up(self, piece: Slice) -> list[Step]:
        """The step after the tokens that are on record behind a slice that came before.

        If it is one more copy after all, its own commit will be refused, and that is the end of it.
        """
        step = piece.pending.step
        try:
            events = self._ledger.events(step.request_id, f"{step.end_position - 1}-0")
        except (DecodeError, StoreDamaged):  # the scheduler buries it
            return []
        token_ids = [event.token_id for event in events if isinstance(event, TokenEvent)]
        if not token_ids or len(token_ids) < len(events):  # it has ended
            return []
        return [self._routed(piece, following_step(step, token_ids=token_ids, num_computed=0))]

    def _decode_step(self, piece: Slice, outcome: GoOn, slices: Sequence[Slice]) -> Step:
        """What follows from a slice of the batch `slices`, on its way."""
        step = self._speculative(outcome.step, num_sequences=len(slices))
        return self._routed(piece, step)

    def _speculative(self, step: Step, *, num_sequences: int) -> Step:
        """The decode step with a draft, if its rows will be found where they were computed."""
        if not self._rows_stay(step):
            return known_alone(step)
        return self._speculation.drafted(step, num_sequences=num_sequences)

    def _rows_stay(self, step: Step) -> bool:
        """Whether each group's next turn is for the worker that had the last one."""
        if not self._worker_id:
            return self._kv_pages is None  # one worker a group
        return self._sender.serve(step.route, range(self._layout.last_group))

    def _routed(self, piece: Slice, following: Step) -> Step:
        """The step that follows from a slice, on its way to a worker of its group."""
        if not self._worker_id:
            return following
        state = self._pool.peek(piece.group, piece.request_id)
        known, shunned = worker_of(following.route, following.group), ""
        if state is not None and state.next_epoch == following.epoch:
            known = known or state.next_worker
        elif state is not None:
            shunned = state.next_worker  # it was driven again: perhaps that one came to a stop
        # What was accepted of a draft is in one cache alone.
        chosen = self._sender.choose(
            following.group, known, shunned=shunned, is_bound=bool(following.accepted)
        )
        if state is not None:
            state.next_worker, state.next_epoch = chosen, following.epoch
        return routed(following, worker_id=self._worker_id, group=piece.group, next_worker=chosen)
