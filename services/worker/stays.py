"""Decides which steps that follow stay in this worker. Pure: knows no queue, store or kernel.

A step whose worker is the one that made it need not travel. It is computed with a next turn, and
the delivery it followed from stays unsettled for it: should this process die, that is given out
again, and whoever computes it finds by the record how far its request has come. Its KV rows may
wait as well, for they can be computed again from the tokens.

At the end of each page of rows a step leaves by its queue nevertheless: what may have to be
computed again is a page at most, another worker can be chosen, and others get the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from services.worker.batch import Slice
from shared.messages import Step
from shared.router import worker_of


class Stays:
    """The choice of one worker, which serves `groups`. `room` says how many deliveries of a queue
    may be kept from it; a worker without an id stands alone, and all that it serves is its own if
    `is_alone`."""

    def __init__(
        self,
        groups: Container[int],
        *,
        worker_id: str,
        is_alone: bool,
        num_staying: Callable[[], Counter[str]],
        room: Callable[[str], int],
    ) -> None:
        self.is_leaving = False  # then nothing stays any more
        self._groups = groups
        self._worker_id = worker_id
        self._is_alone = is_alone
        self._num_staying = num_staying
        self._room = room
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """A turn is to choose: count what stays."""
        self._counts = self._num_staying()

    def may(self, piece: Slice, following: Step) -> bool:
        """Whether the step that follows from a slice of this turn may stay, and then it is counted.

        What may have killed a worker does not: its attempts are counted by its deliveries.
        """
        item = piece.pending
        if (
            self.is_leaving
            or piece.start > 0
            or not piece.completes
            or item.is_suspect
            or item.early_since_s is not None
            or following.group not in self._groups
            or not self._is_mine(following)
        ):
            return False
        if item.stays:
            return True
        queue = item.delivery.queue
        if self._counts[queue] >= self._room(queue):
            return False
        self._counts[queue] += 1
        return True

    def _is_mine(self, following: Step) -> bool:
        if not self._worker_id:
            return self._is_alone
        return worker_of(following.route, following.group) == self._worker_id
