"""Takes deliveries, decodes them and keeps them until each is settled, once. Knows no kernel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from services.worker.batch import Pending
from services.worker.stages import unix_us
from shared import late_frame
from shared.broker.base import Broker, Delivery, Outgoing
from shared.dead_letters import DeadLetter
from shared.errors import PermanentError, TransientError
from shared.messages import Step
from shared.topology import group_queue, inbox_owner, is_inbox

log = structlog.get_logger()


class Inbox:
    """The unsettled steps of one worker, in order of arrival.

    `problem` says why a step cannot be computed here ("" if it can): such a step, like a frame
    that is no step at all, is dead-lettered at the door. `is_repeat` says whether this process
    saw the broker confirm the step's output: then it is acked at the door. `is_redriven` says
    whether it is the first of an epoch that is not the first one: what came before may have died.
    `doubt` hears of each worker that left a step lying until it came here. `can_go_on` says whether
    all that another worker needs for a step that stays is in the stores.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        problem: Callable[[Step], str],
        is_repeat: Callable[[Step], bool],
        is_redriven: Callable[[Step], bool],
        doubt: Callable[[str], None],
        can_go_on: Callable[[Step], bool],
        max_pending: int,
        worker_id: str = "",
        confirm_timeout_s: float = 10.0,
    ) -> None:
        self._broker = broker
        self._problem = problem
        self._is_repeat = is_repeat
        self._is_redriven = is_redriven
        self._doubt = doubt
        self._can_go_on = can_go_on
        self._max_pending = max_pending
        self._worker_id = worker_id
        self._confirm_timeout_s = confirm_timeout_s
        self._items: list[Pending] = []
        self._staying: dict[str, Pending] = {}  # by request, the one that began to stay last

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Pending) -> bool:
        return item in self._items

    def items(self) -> list[Pending]:
        return list(self._items)

    def receive(self, timeout_s: float, *, now_s: float) -> None:
        """Take what has arrived; wait at most `timeout_s` if there is nothing to do."""
        if self._items:
            # Do not sleep on the queue while work is at hand: parked items bound the sleep.
            soonest_s = min(item.retry_at_s for item in self._items)
            timeout_s = min(timeout_s, max(0.0, soonest_s - now_s))
        delivery = self._broker.take(timeout_s)
        while delivery is not None:
            self._admit(delivery)
            if len(self._items) >= self._max_pending:
                break
            delivery = self._broker.take(0.0)

    def keep(self, item: Pending, following: Step) -> None:
        """Its step is done, and what follows is computed here: one delivery stands for both."""
        if self._remove(item):
            item = Pending(_arriving_now(item.delivery), following, stays=True)
            self._items.append(item)
            self._staying[following.request_id] = item

    def staying(self, request_id: str, *, epoch: int) -> Pending | None:
        """The step of a request that stays."""
        item = self._staying.get(request_id)
        return item if item is not None and item.step.epoch == epoch else None

    @property
    def num_waiting(self) -> int:
        """Steps that came from outside."""
        return sum(not item.stays for item in self._items)

    def num_staying(self) -> Counter[str]:
        """By queue, how many of its deliveries stand for a step that followed from theirs."""
        return Counter(item.delivery.queue for item in self._items if item.stays)

    def ack(self, item: Pending) -> None:
        """Settle as done, unless it is settled already."""
        if self._remove(item):
            self._broker.ack(item.delivery)

    def dead_letter(
        self, item: Pending, reason: str, *, num_attempts: int = 1, workers: tuple[str, ...] = ()
    ) -> None:
        """Settle as poison, unless it is settled already."""
        if self._remove(item):
            step = item.step
            letter = DeadLetter(
                reason=reason,
                queue=group_queue(step.model_id, step.layout_id, step.group),
                request_id=step.request_id,
                group=step.group,
                attempts=num_attempts,
                workers=(*workers, self._worker_id) if self._worker_id else workers,
            )
            self._bury(item.delivery, letter)

    def hand_back(self, items: Iterable[Pending]) -> None:
        """Give them back to their groups, but for those that are settled already.

        What came to this worker's own inbox moves to the group's queue: nobody else takes it here.
        Of a step that stays what it came from goes back, unless anyone `can_go_on` with the step.
        """
        unsettled = [item for item in items if self._remove(item)]
        to_send = [item for item in unsettled if item.stays and self._can_go_on(item.step)]
        sent = to_send if self._send_on([item.step for item in to_send]) else []
        for item in unsettled:
            if item in sent:
                self._broker.ack(item.delivery)
            else:
                self._broker.reject(item.delivery, requeue=not is_inbox(item.delivery.queue))

    def _remove(self, item: Pending) -> bool:
        if item not in self._items:
            return False
        self._items.remove(item)
        if self._staying.get(item.step.request_id) is item:
            del self._staying[item.step.request_id]
        return True

    def _admit(self, delivery: Delivery) -> None:
        began_ns = time.perf_counter_ns()
        try:
            step = late_frame.read(delivery.content)
        except PermanentError as error:
            self._refuse(delivery, str(error))
            return
        if not isinstance(step, Step):
            self._refuse(delivery, f"a {type(step).__name__} has no business in a step queue")
        elif problem := self._problem(step):
            self._refuse(delivery, problem)
        elif self._is_repeat(step):
            self._broker.ack(delivery)
        elif (item := self._what_followed(step)) is not None:
            # What it led to waits here. It may be the same delivery, after a lost connection: then
            # the old one stands for nothing any more.
            self._broker.ack(item.delivery)
            item.delivery = _arriving_now(delivery)
        else:
            left_by = inbox_owner(delivery.handed_over_from)
            if left_by and left_by != self._worker_id:
                self._doubt(left_by)
            came_before = delivery.redelivered or bool(delivery.handed_over_from)
            is_suspect = came_before or self._is_redriven(step)
            item = Pending(delivery, step, is_suspect=is_suspect, came_before=came_before)
            item.decode_ns = time.perf_counter_ns() - began_ns
            self._items.append(item)

    def _what_followed(self, step: Step) -> Pending | None:
        item = self.staying(step.request_id, epoch=step.epoch)
        if item is None:
            return None
        is_before = (step.end_position, step.group) <= (item.step.end_position, item.step.group)
        return item if is_before else None

    def _send_on(self, steps: Sequence[Step]) -> bool:
        if not steps or not self._broker.connected():
            return False
        outgoing = [
            Outgoing(group_queue(s.model_id, s.layout_id, s.group), late_frame.Frame(s))
            for s in steps
        ]
        try:
            self._broker.publish(outgoing).wait(self._confirm_timeout_s)
        except TransientError as error:
            log.warning("steps_not_sent_on", reason=str(error))
            return False
        return True

    def _refuse(self, delivery: Delivery, reason: str) -> None:
        log.warning("step_refused", queue=delivery.queue, reason=reason, bytes=len(delivery.body))
        workers = (self._worker_id,) if self._worker_id else ()
        self._bury(delivery, DeadLetter(reason, queue=delivery.queue, workers=workers))

    def _bury(self, delivery: Delivery, letter: DeadLetter) -> None:
        """Keep a message for inspection, with its history."""
        try:
            self._broker.publish([letter.message(delivery)]).wait(self._confirm_timeout_s)
        except TransientError as error:
            log.warning("burial_failed", queue=delivery.queue, reason=str(error))
            self._broker.reject(delivery, requeue=False)  # then the broker moves it, bare
        else:
            self._broker.ack(delivery)


def _arriving_now(delivery: Delivery) -> Delivery:
    return replace(delivery, sent_unix_us=0, arrived_unix_us=unix_us())
