"""Decides what becomes of a request that runs: wait, drive it again, or end it.

Values in, values out; knows no queue, store or clock. Seconds are those of one monotonic clock.

A request *moves* when it commits a token or its KV rows grow, as in a long prefill. One that has
not moved for its patience is driven again from the shortest memory. Patience doubles with every
re-drive that led no further, so that a slow step is not fenced for ever, and after `max_redrives`
of those the request ends by name. Positions are bounded, and so are the re-drives of a request.

G layer groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from shared.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class RedriveLimits:
    """`redrive_after_s` is more than broker redelivery and an inbox's time to live need together.

    `pace_factor` times the pace of the others is waited where that is more: behind a backlog or on
    slow machines a step that takes long is not lost. `unknown_pace_s` stands for the time to the
    first sign of life as long as none was seen.
    """

    redrive_after_s: float = 0.8
    max_redrive_after_s: float = 30.0
    max_redrives: int = 8
    uncovered_grace_s: float = 15.0
    pace_factor: float = 4.0
    unknown_pace_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """What is known of a request that runs.

    `moved_s` is when it last moved, `rows` the KV rows (G,) when they were last counted, None if
    that was before its last token. `most_rows` is the largest sum of them ever seen: growing up to
    it again, after a loss, is a sign of life but leads no further. `num_redrives` counts those
    since the request last got further, `jitter` in (0, 1] scales the wait after each.
    `deadline_unix_ms` 0 means none.
    """

    epoch: int
    committed_position: int
    moved_s: float
    started_s: float
    deadline_unix_ms: int = 0
    rows: tuple[int, ...] | None = None
    most_rows: int = 0
    num_redrives: int = 0
    jitter: float = 1.0
    has_moved: bool = False

    def committed(self, *, epoch: int, committed_position: int, now_s: float) -> Running:
        """As the ledger tells; another epoch means that another scheduler drives it too."""
        if committed_position > self.committed_position:
            return replace(
                self,
                epoch=epoch,
                committed_position=committed_position,
                moved_s=now_s,
                rows=None,
                num_redrives=0,
                jitter=1.0,
                has_moved=True,
            )
        if epoch != self.epoch or committed_position < self.committed_position:
            # A store that lost its last second has less than it had.
            return replace(
                self, epoch=epoch, committed_position=committed_position, moved_s=now_s, rows=None
            )
        return self

    def counted(self, rows: Sequence[int], *, now_s: float) -> Running:
        """As the KV store tells; `rows` (G,)."""
        before, total = self.rows, sum(rows)
        after = replace(self, rows=tuple(rows), most_rows=max(self.most_rows, total))
        if before is None or not any(new > old for new, old in zip(rows, before, strict=True)):
            return after
        after = replace(after, moved_s=now_s, has_moved=True)
        if total > self.most_rows:
            after = replace(after, num_redrives=0, jitter=1.0)
        return after

    def redriven(self, *, epoch: int, now_s: float, jitter: float) -> Running:
        """After a re-drive was published."""
        return replace(
            self, epoch=epoch, moved_s=now_s, num_redrives=self.num_redrives + 1, jitter=jitter
        )

    def excused(self, seconds: float, *, now_s: float) -> Running:
        """For time in which it could not move, or was not watched."""
        return replace(self, moved_s=min(self.moved_s + seconds, now_s))


@dataclass(slots=True)
class Pace:
    """How long requests take to move once: the median of the last ones, seconds.

    The first move of a request waits for its turn in the prefill, so it has a pace of its own.
    """

    _first: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    _next: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def note(self, before: Running, after: Running) -> None:
        """Learn from a request that was seen to move."""
        if after.has_moved and after.moved_s > before.moved_s:
            (self._next if before.has_moved else self._first).append(after.moved_s - before.moved_s)

    def typical_s(self, running: Running, unknown_s: float) -> float:
        seen = self._next if running.has_moved else self._first
        return median(seen) if seen else unknown_s


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What holds for all requests: the time, and since when which layer group has no worker."""

    now_s: float
    now_unix_ms: int
    num_groups: int
    uncovered_group: int | None = None
    uncovered_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done yet."""


@dataclass(frozen=True, slots=True)
class Redrive:
    """Send the tokens from `position` on again, at a new epoch."""

    position: int


@dataclass(frozen=True, slots=True)
class End:
    """The request cannot go on; its requester hears `reason`, and its program `code`."""

    reason: str
    code: ErrorCode


Decision = Wait | Redrive | End


def patience_s(running: Running, typical_s: float, limits: RedriveLimits) -> float:
    """How long the request may stand still before it is driven again."""
    first = min(
        max(limits.redrive_after_s, limits.pace_factor * typical_s), limits.max_redrive_after_s
    )
    grown = first * 2.0 ** min(running.num_redrives, 30)
    return min(grown, limits.max_redrive_after_s) * running.jitter


def wants_count(
    running: Running, around: Surroundings, typical_s: float, limits: RedriveLimits
) -> bool:
    """Whether its KV rows are worth a look: it has stood still for half of its patience."""
    still_s = around.now_s - running.moved_s
    return around.uncovered_group is None and still_s >= patience_s(running, typical_s, limits) / 2


def decide_end(running: Running, around: Surroundings, limits: RedriveLimits) -> Wait | End:
    """Whether a request must end whether it moves or not: overdue, or nobody serves a group."""
    if 0 < running.deadline_unix_ms <= around.now_unix_ms:
        return End("the request's deadline has passed", ErrorCode.DEADLINE)
    group = around.uncovered_group
    if group is not None:
        since_s = max(around.uncovered_since_s, running.started_s)
        if around.now_s - since_s >= limits.uncovered_grace_s:
            return End(
                f"layer group {group} of {around.num_groups} has no live worker; "
                f"start one: cellpipe worker --group {group}",
                ErrorCode.NO_WORKERS,
            )
    return Wait()


def decide(
    running: Running, around: Surroundings, typical_s: float, limits: RedriveLimits
) -> Decision:
    """What becomes of the request now. Its rows must have been counted for anything but `Wait`."""
    end = decide_end(running, around, limits)
    if isinstance(end, End) or around.uncovered_group is not None or running.rows is None:
        return end
    if around.now_s - running.moved_s < patience_s(running, typical_s, limits):
        return Wait()
    if running.num_redrives >= limits.max_redrives:
        return End(_no_progress(running), ErrorCode.FAILED)
    return Redrive(redrive_position(running.rows, running.committed_position))


def redrive_position(rows: Sequence[int], committed_position: int) -> int:
    """The first position to send again: an intact cache needs the last token alone."""
    return max(0, min(*rows, committed_position))


def _no_progress(running: Running) -> str:
    assert running.rows is not None
    needed = running.committed_position + 1
    behind = next(
        (group for group, num_rows in enumerate(running.rows) if num_rows < needed),
        len(running.rows) - 1,  # all have computed it, and no token came
    )
    return (
        f"position {needed} did not come in {running.num_redrives} attempts; "
        f"layer group {behind} of {len(running.rows)} is the first that does not answer"
    )
