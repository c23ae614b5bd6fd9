"""Chooses what a worker computes next. Pure: knows no queue, clock or kernel.

A turn runs one layer group over one batch. Decode steps go first, since someone waits for each;
prefill slices fill what is left of the row budget (`pace.py` says how much of it is theirs), so a
long prompt never blocks the others. A draft is cut where the budget ends, and left out where a step
may have killed a worker. Where somebody waits, few steps of batches run beside, so that a turn is
short, and always one that waits longest, so that none starves. What is computed of a request in one
turn goes on as one message, which has a limit of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.broker.base import MAX_BODY_BYTES, Confirm, Delivery
from shared.errors import ModelError
from shared.messages import Step

# Of a step beside its hidden states: 1,024 names of workers on its route, stop tokens, ids.
MAX_HEADER_BYTES = 256 << 10
BATCH_PREFILL_ROWS = 16  # of a prompt of a batch while somebody waits


@dataclass(slots=True, eq=False)
class Pending:
    """A delivery that waits for its turn. `done` rows of it are computed and passed on.

    While its KV rows are missing it is parked: `retry_at_s` (monotonic) says when to look again,
    `parked_since_s` since when it waits. A suspect is computed alone: it may have killed the worker
    that had it before, as one that `came_before` may. `is_marked` says that the store knows of the
    attempt, `suspected_since_s` since when it waits to be told whether others died of it.
    `early_since_s` says since when its tokens wait for those before them, and `is_early` that this
    turn could not settle it for that.
    `decode_ns` is what it took to read, `unconfirmed` is of the slice before, if nobody has waited
    for it. A step that `stays` followed from another one here, and was in no queue: the delivery is
    of the first of those (see `stays.py`).
    """

    delivery: Delivery
    step: Step
    done: int = 0
    parked_since_s: float | None = None
    retry_at_s: float = 0.0
    is_suspect: bool = False
    came_before: bool = False
    stays: bool = False
    is_marked: bool = False
    suspected_since_s: float | None = None
    early_since_s: float | None = None
    is_early: bool = False
    decode_ns: int = 0
    unconfirmed: Confirm | None = None

    @property
    def remaining(self) -> int:
        return self.step.num_positions - self.done

    @property
    def is_prefill(self) -> bool:
        """Whether it is of a prompt, or what comes after a re-drive; a draft makes none."""
        return self.step.end_position - self.step.position > 1

    def park(self, *, now_s: float, retry_s: float) -> float:
        """Look again in `retry_s`. Returns the seconds that it waits already."""
        if self.parked_since_s is None:
            self.parked_since_s = now_s
        self.retry_at_s = now_s + retry_s
        return now_s - self.parked_since_s


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `start .. start + num_rows` of a pending step, computed in one turn.

    `position` is that of the first row, `end_position` the one after the last. `draft` are the
    guessed tokens among its rows, which are the last ones, and `accepted` the tokens right before
    its first row whose rows are not in the store yet. `completes` says whether the step is done
    once this slice is; a draft may be cut short.
    """

    pending: Pending
    start: int
    num_rows: int
    request_id: str = field(init=False, compare=False, repr=False)
    group: int = field(init=False, compare=False, repr=False)
    position: int = field(init=False, compare=False)
    end_position: int = field(init=False, compare=False)
    draft: tuple[int, ...] = field(init=False, compare=False)
    accepted: tuple[int, ...] = field(init=False, compare=False)
    completes: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        step, keep = self.pending.step, object.__setattr__
        keep(self, "request_id", step.request_id)
        keep(self, "group", step.group)
        keep(self, "position", step.position + self.start)
        keep(self, "end_position", self.position + self.num_rows)
        keep(self, "draft", step.draft[: self.num_rows - 1])
        keep(self, "accepted", () if self.start else step.accepted)
        is_last = self.start + self.num_rows == step.num_positions
        keep(self, "completes", is_last or bool(step.draft))

    def without_draft(self) -> Slice:
        """The same with its known tokens alone."""
        return Slice(self.pending, self.start, self.num_rows - len(self.draft))


def max_slice_rows(row_bytes: int) -> int:
    """The rows whose message every broker of ours takes, at `row_bytes` of hidden state each.

    Raises `ModelError` where not even one fits.
    """
    num_rows = (MAX_BODY_BYTES - MAX_HEADER_BYTES) // row_bytes
    if num_rows < 1:
        raise ModelError(
            f"the hidden state of one position takes {row_bytes} bytes, and a message has "
            f"{MAX_BODY_BYTES}",
            remedy="load it with a shorter wire: cellpipe load MODEL --wire i8",
        )
    return num_rows


def plan_batch(
    pending: Iterable[Pending],
    *,
    now_s: float,
    max_rows: int,
    max_sequences: int,
    max_slice_rows: int | None = None,
    max_prefill_rows: int | None = None,
    max_positions: Mapping[int, int] | None = None,
    max_batch_steps: int | None = None,
    group_order: Sequence[int] = (),
    suspects_first: bool = True,
) -> list[Slice]:
    """Choose the slices of the next turn: one group, one slice a request, at most `max_rows` rows
    in all and `max_slice_rows` in one.

    Of those at most `max_prefill_rows` are of prompts, or half as many again where a slice would
    leave a rest that is not worth a turn.

    At most `max_batch_steps` of them are of batches, those that wait longest; None is no bound. The
    first of these goes beside the first of the others, before it where it came before it: neither
    kind keeps the other waiting.

    The positions that its sequences hold by its end are at most `max_positions` of the group, or
    those of the first alone. None is no bound.

    A suspect has a turn to itself. A caller who turns `suspects_first` round after each turn lets
    neither them nor the others starve.

    The group is the first of `group_order` that has work, else that of the oldest item. A caller
    who orders groups by their last turn lets none starve, however long a prompt in another is.
    """
    ready = [item for item in pending if item.retry_at_s <= now_s]
    if not ready:
        return []
    candidates = ready
    if len(ready) > 1:  # else there is nothing to choose
        candidates = _candidates(ready, group_order, suspects_first=suspects_first)
        candidates = _in_order(candidates, max_batch_steps)
    slices: list[Slice] = []
    rows_left = max_rows
    prefill_left = max_rows if max_prefill_rows is None else max_prefill_rows
    room = math.inf if max_positions is None else max_positions[candidates[0].step.group]
    for item in candidates[:max_sequences]:
        if item.is_prefill:
            bound = prefill_left
            if item.step.is_batch and max_batch_steps is not None:
                bound = min(bound, BATCH_PREFILL_ROWS)
            whole = item.remaining <= bound + bound // 2
            num_rows = min(item.remaining if whole else bound, rows_left)
            prefill_left = max(0, prefill_left - num_rows)
        elif item.step.draft and item.is_suspect:
            num_rows = min(1, rows_left)
        else:
            num_rows = min(item.remaining, rows_left)
        if max_slice_rows is not None:
            num_rows = min(num_rows, max_slice_rows)
        piece = Slice(item, item.done, num_rows)
        if num_rows == 0 or (slices and piece.end_position > room):
            break
        slices.append(piece)
        room -= piece.end_position
        rows_left -= num_rows
    return slices


def _candidates(
    ready: Sequence[Pending], group_order: Sequence[int], *, suspects_first: bool
) -> list[Pending]:
    """Those of one group that may share a batch, in the order of their arrival."""
    with_work = {item.step.group for item in ready}
    group = next((g for g in group_order if g in with_work), ready[0].step.group)
    candidates = [item for item in _first_of_each_request(ready) if item.step.group == group]
    suspects = [item for item in candidates if item.is_suspect]
    if suspects and (suspects_first or len(suspects) == len(candidates)):
        # The one that waits longest for another look: a parked one would keep the others waiting.
        return [min(suspects, key=lambda item: item.retry_at_s)]
    if suspects:
        candidates = [item for item in candidates if not item.is_suspect]
    return candidates


def _in_order(candidates: Sequence[Pending], max_batch_steps: int | None) -> list[Pending]:
    """Decode steps before prefill; where those of batches are bounded, one of each kind goes first.

    sorted is stable: arrival order holds within each kind.
    """
    if max_batch_steps is None:
        return sorted(candidates, key=lambda item: item.is_prefill)
    of_batches = [item for item in candidates if item.step.is_batch][:max_batch_steps]
    others = [item for item in candidates if not item.step.is_batch]
    rest = sorted(others, key=lambda item: item.is_prefill)
    rest += sorted(of_batches[1:], key=lambda item: item.is_prefill)
    first = [*of_batches[:1], *rest[:1]]
    if others:
        first.sort(key=candidates.index)
    return [*first, *rest[1:]] if of_batches else rest


def _first_of_each_request(items: Iterable[Pending]) -> Iterable[Pending]:
    """The earliest rows of each (request, group): later ones need their KV rows."""
    first: dict[tuple[str, int], Pending] = {}
    for item in items:
        key = (item.step.request_id, item.step.group)
        held = first.get(key)
        if held is None or item.step.position < held.step.position:
            first[key] = item
    return first.values()
