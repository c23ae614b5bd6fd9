"""Scores a text's windows by asking whoever serves the model: one request for each position.

A request tells the log probability of the token that it draws, by the logits as they are: a bias
changes what is drawn and not what is told (`shared/model/logprobs.py`). So each position is asked
for one token after the text before it, with a bias that makes the text's own next token be drawn.

The longest prompt of a window goes first and alone. The others of that window begin as it does: the
prefix cache has all their full pages by then, and each computes less than two pages.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog

from services.quality.evaluate import Evaluation, Progress, check_window
from services.quality.scores import Perplexity
from services.quality.windows import Windows
from shared.backoff import Backoff
from shared.errors import (
    ErrorCode,
    ModelError,
    Overloaded,
    PermanentError,
    RequestError,
    TransientError,
)
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer, new_request_id
from shared.sampling_params import MAX_BIAS
from shared.store.ledger_base import START
from shared.store.ledger_types import Event, FinalEvent, TokenEvent

log = structlog.get_logger()

NUM_IN_FLIGHT = 16  # half of what a scheduler runs of batches unless told otherwise
MAX_OPENING = 2  # windows whose rows are computed ahead: more would crowd out those in use
POLL_S = 0.02
CHECK_EVERY_S = 1.0
LOST_AFTER_S = 30.0  # without a sign of anything: longer than a scheduler takes to be replaced
PATIENCE_S = 60.0  # without servers or schedulers: longer than either takes to be restarted


@dataclass(frozen=True, slots=True)
class Position:
    """The token `target` at `index` of window `window`, given all before it in the window."""

    window: int
    index: int
    target: int


@dataclass(slots=True)
class _Asked:
    """A position that is asked for. `seen`: the ledger has known its request."""

    position: Position
    request: Request
    submitted_at_s: float = 0.0
    after: str = START
    seen: bool = False
    drawn: TokenEvent | None = None


def request_of(position: Position, windows: Windows, *, model_id: str) -> Request:
    """What asks for the log probability of a position's token."""
    before = windows.inputs[position.window, : position.index]
    return Request(
        request_id=new_request_id(),
        token_ids=tuple(before.tolist()),
        model=model_id,
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            speculation=False,
            logit_bias=((position.target, MAX_BIAS),),
            logprobs=0,
        ),
    )


def logprob_of(position: Position, drawn: TokenEvent | None, final: FinalEvent) -> float:
    """What an answer tells of its position, in nats.

    Raises `PermanentError` for a request that failed, with its own error, or that somebody ended,
    `ModelError` for another token than the text's and for a number that is none.
    """
    where = f"token {position.index} of window {position.window}"
    if final.finish_reason is FinishReason.ERROR:
        raise PermanentError(f"{where} was not scored: {final.error}")
    if drawn is None:
        raise PermanentError(f"{where} was not scored: its request was cancelled by somebody")
    if drawn.token_id != position.target:
        raise ModelError(
            f"{where}: token {position.target} was to be drawn, and {drawn.token_id} was: its "
            f"logit is over {MAX_BIAS:g} larger",
            remedy="leave out --cluster: this process scores it as it is",
        )
    if drawn.logprobs is None:
        raise PermanentError(
            f"{where} has no log probability: a worker or scheduler is of an older version"
        )
    if not math.isfinite(drawn.logprobs.logprob):
        raise ModelError(
            f"{where}: its log probability is not finite", remedy="the model's weights are damaged"
        )
    return drawn.logprobs.logprob


@dataclass
class ServedRun:
    """`turn` until `is_done`; `cancel` if it is not to be ended. `check` raises a `TransientError`
    when nobody is there to serve, and anything else when all is lost."""

    producer: Producer
    windows: Windows
    model_id: str
    check: Callable[[], None]
    num_in_flight: int = NUM_IN_FLIGHT
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    losses: npt.NDArray[np.float64] = field(init=False)  # (N, scored), NaN where it is not known
    _todo: deque[Position] = field(init=False, default_factory=deque)
    _asked: dict[str, _Asked] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = np.full(self.windows.targets.shape, np.nan)
        self._last = self.windows.targets.shape[1] - 1
        self._unopened = deque(range(len(self.windows.targets)))
        self._overload = Backoff(first_s=1.0, max_s=60.0)
        self._outage = Backoff(first_s=0.1, max_s=5.0)
        self._submit_at_s = 0.0
        self._worked_at_s = self._checked_at_s = self._heard_at_s = self.clock()

    @property
    def num_done(self) -> int:
        return int(np.count_nonzero(~np.isnan(self.losses)))

    @property
    def is_done(self) -> bool:
        return self.num_done == self.losses.size

    def turn(self) -> None:
        """Ask for what there is room for, take what has come; then wait a little.

        Raises what `logprob_of` and `check` do, and the `TransientError` of servers that are away
        for too long.
        """
        is_silent = self._is_check_due()
        if is_silent:
            self.check()
        try:
            if is_silent:
                self._ask_again_for_what_is_lost()
            self._submit()
            has_ended = self._look()
        except TransientError as error:
            if self.clock() - self._worked_at_s > PATIENCE_S:
                raise
            wait_s = self._outage.next_s()
            log.warning("evaluation_waits", reason=str(error), wait_ms=round(wait_s * 1e3))
            self.sleep(wait_s)
            return
        self._worked_at_s = self.clock()
        self._outage.reset()
        if has_ended:
            self._heard_at_s = self.clock()
        else:
            self.sleep(POLL_S)

    def cancel(self) -> None:
        """End what runs: nobody will read it. What does not answer is left to its end."""
        for request_id in list(self._asked):
            try:
                self.producer.cancel(request_id, is_submitted=True)
            except RequestError:
                pass  # it never came to its queue
            except TransientError:
                return
            self._asked.pop(request_id)

    def _submit(self) -> None:
        if self.clock() < self._submit_at_s:
            return
        while len(self._asked) < self.num_in_flight:
            position = self._next()
            if position is None:
                return
            asked = _Asked(position, request_of(position, self.windows, model_id=self.model_id))
            # Known before it is sent: an interrupt between the two leaves none behind.
            self._asked[asked.request.request_id] = asked
            if not self._hand_over(asked):
                del self._asked[asked.request.request_id]
                self._todo.appendleft(position)
                return

    def _next(self) -> Position | None:
        """The longest prompt of a next window before the others of this one run out; else those."""
        opening = sum(self._number(asked.position) == self._last for asked in self._asked.values())
        if self._unopened and opening < MAX_OPENING and len(self._todo) < self.num_in_flight:
            return self._position(self._unopened.popleft(), self._last)
        return self._todo.popleft() if self._todo else None

    def _position(self, window: int, number: int) -> Position:
        """Scored position `number` of a window."""
        index = self.windows.first_scored + 1 + number
        return Position(window, index, int(self.windows.targets[window, number]))

    def _number(self, position: Position) -> int:
        return position.index - self.windows.first_scored - 1

    def _hand_over(self, asked: _Asked) -> bool:
        """False when the cluster takes no more for now."""
        try:
            self.producer.submit(asked.request, batch=True)
        except Overloaded as error:
            self._submit_at_s = self.clock() + max(error.retry_after_s, self._overload.next_s())
            return False
        self._overload.reset()
        asked.submitted_at_s = self.clock()
        return True

    def _look(self) -> bool:
        """Whether any has ended since the last look."""
        if not self._asked:
            return False
        events = self.producer.new_events({i: asked.after for i, asked in self._asked.items()})
        num_ended = sum(self._take(request_id, each) for request_id, each in events.items())
        return num_ended > 0

    def _take(self, request_id: str, events: Sequence[Event]) -> bool:
        asked = self._asked[request_id]
        for event in events:
            asked.after = event.event_id
            asked.seen = True
            if isinstance(event, TokenEvent):
                asked.drawn = event
                continue
            del self._asked[request_id]
            if event.error_code == ErrorCode.LOST:
                self._todo.appendleft(asked.position)
                return True
            position, number = asked.position, self._number(asked.position)
            self.losses[position.window, number] = -logprob_of(position, asked.drawn, event)
            if number == self._last:
                self._todo.extend(self._position(position.window, n) for n in range(self._last))
            return True
        return False

    def _is_check_due(self) -> bool:
        now_s = self.clock()
        if now_s - max(self._checked_at_s, self._heard_at_s) < CHECK_EVERY_S:
            return False
        self._checked_at_s = now_s
        return True

    def _ask_again_for_what_is_lost(self) -> None:
        """What the ledger knew and knows no more, or has not come to know for long: a server lost
        its memory. One that still waits in its queue is computed once all the same.
        """
        states: Mapping[str, object] = self.producer.states(self._asked)
        for request_id, asked in self._asked.items():
            if request_id in states:
                asked.seen = True
            elif asked.seen or self.clock() - asked.submitted_at_s > LOST_AFTER_S:
                asked.after, asked.drawn = START, None
                asked.seen = not self._hand_over(asked)


def evaluate_served(run: ServedRun, *, max_positions: int, progress: Progress) -> Evaluation:
    """Score a run's windows to the end. What is under way is cancelled if that does not come.

    Raises `ConfigError` for a window longer than the model's context, and what `turn` does.
    """
    windows = run.windows
    check_window(windows, max_positions)
    try:
        while not run.is_done:
            progress(run.num_done, run.losses.size)
            run.turn()
    finally:
        run.cancel()  # nothing, if all has ended
    progress(run.num_done, run.losses.size)
    return Evaluation(
        perplexity=Perplexity.of(run.losses.ravel()),
        num_windows=len(windows.inputs),
        window=windows.inputs.shape[1],
        num_tokens=windows.num_tokens,
    )
