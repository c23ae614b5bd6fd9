"""A pipeline's answers give the perplexity that the kernel gives window by window."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from services.quality.evaluate import evaluate
from services.quality.scores import Perplexity
from services.quality.served import Position, ServedRun, evaluate_served, logprob_of, request_of
from services.quality.stages import KernelModel
from services.quality.windows import Windows
from shared.errors import (
    ConfigError,
    ModelError,
    Overloaded,
    PermanentError,
    StoreUnavailable,
    TransientError,
)
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, Request
from shared.model.backend import pick_backend
from shared.producer import Producer
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.topology import BATCH_QUEUE, REQUESTS_QUEUE
from tests.rig import Rig
from tests.rig_model import prompt_of, rig_model

WINDOW, NUM_WINDOWS = 64, 3
FIRST = WINDOW // 2
MODEL_ID = rig_model().manifest.model_id
POSITION = Position(window=2, index=40, target=7)


def windows_of(num: int = NUM_WINDOWS, window: int = WINDOW) -> Windows:
    ids = np.array(prompt_of(num * window), np.int32).reshape(num, window)
    return Windows(ids, ids[:, window // 2 + 1 :].copy(), window // 2, num * window)


@dataclass
class Served:
    """A rig of two groups, and a run over it whose every wait gives the rig a turn."""

    rig: Rig = field(default_factory=lambda: Rig(2))
    submitted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        for group in range(2):
            self.rig.add_worker(group)
        self.rig.add_scheduler()
        self.producer = Producer(self.rig.new_broker(), self.rig.ledger)
        submit = self.producer.submit

        def noted(request: Request, **options: Any) -> str:
            self.submitted.append(request)
            return submit(request, **options)

        self.producer.submit = noted  # type: ignore[method-assign]

    def run(
        self, windows: Windows | None = None, check: Callable[[], None] = lambda: None
    ) -> ServedRun:
        return ServedRun(
            self.producer, windows or windows_of(), MODEL_ID, check,
            clock=self.rig.clock, sleep=self.wait,
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        self.rig.clock.sleep(seconds)
        self.rig.turn()


def score(run: ServedRun, progress: Callable[[int, int], None] = lambda done, total: None) -> Any:
    return evaluate_served(run, max_positions=256, progress=progress)


def test_perplexity_is_the_kernels() -> None:
    windows, served, seen = windows_of(), Served(), []
    model = rig_model()
    kernel = evaluate(KernelModel(model.manifest, model.read_shard, pick_backend()), windows)

    found = score(served.run(windows), lambda done, total: seen.append((done, total)))

    assert found.perplexity.value == pytest.approx(kernel.perplexity.value, rel=1e-6)
    assert found.perplexity.error == pytest.approx(kernel.perplexity.error, rel=1e-5)
    assert found.perplexity.num_scored == kernel.perplexity.num_scored == len(served.submitted)
    assert replace(found, perplexity=kernel.perplexity) == kernel
    assert seen[0] == (0, 93)
    assert seen[-1] == (93, 93)
    assert seen == sorted(seen)


def test_the_longest_prompt_of_a_window_goes_first_and_alone() -> None:
    served = Served()
    run = served.run()

    run.turn()

    assert [len(request.token_ids or ()) for request in served.submitted] == [WINDOW - 1] * 2
    score(run)
    lengths = [len(request.token_ids or ()) for request in served.submitted]
    assert lengths.count(WINDOW - 1) == NUM_WINDOWS
    assert max(np.bincount(lengths)) == NUM_WINDOWS  # none was asked for twice
    cached = [
        event.num_cached
        for request in served.submitted
        for event in served.rig.ledger.events(request.request_id)
        if isinstance(event, FinalEvent)
    ]
    # All full pages of 16 of each but the first three, and a last token to begin with.
    expected = [(length - 1) // 16 * 16 for length in lengths if length < WINDOW - 1]
    assert sorted(cached) == sorted([0] * NUM_WINDOWS + expected)


def test_no_more_run_at_once_than_allowed_and_they_let_others_go_first() -> None:
    served = Served()
    run = served.run()
    run.num_in_flight = 5
    most = 0

    def count(done: int, total: int) -> None:
        nonlocal most
        most = max(most, len(served.submitted) - done)
        assert served.rig.num_messages(REQUESTS_QUEUE) == 0

    score(run, count)

    assert most == 5


def test_a_request_asks_for_one_token_the_texts_own() -> None:
    windows = windows_of()

    request = request_of(POSITION, windows, model_id=MODEL_ID)

    assert request.token_ids == tuple(windows.inputs[2, :40])
    assert request.model == MODEL_ID
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (1, 0, True)
    assert sampling.logit_bias == ((7, 100.0),)
    assert sampling.logprobs == 0


def final(reason: FinishReason = FinishReason.LENGTH, error: str = "") -> FinalEvent:
    return FinalEvent("2-0", reason, error, 40, 1)


def token(token_id: int = 7, logprob: float | None = -1.5) -> TokenEvent:
    told = None if logprob is None else TokenLogprobs.of(logprob)
    return TokenEvent("1-0", 40, token_id, told)


def test_an_answer_tells_the_log_probability() -> None:
    assert logprob_of(POSITION, token(), final()) == -1.5


@pytest.mark.parametrize(
    ("drawn", "end", "error", "message"),
    [
        (None, final(FinishReason.ERROR, "no worker"), PermanentError, "not scored: no worker"),
        (None, final(FinishReason.ABORT), PermanentError, "cancelled by somebody"),
        (token(8), final(), ModelError, "token 7 was to be drawn, and 8 was"),
        (token(logprob=None), final(), PermanentError, "no log probability"),
        (token(logprob=math.nan), final(), ModelError, "not finite"),
        (token(logprob=-math.inf), final(), ModelError, "not finite"),
    ],
)
def test_an_answer_without_one_is_refused_by_its_place(
    drawn: TokenEvent | None, end: FinalEvent, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"token 40 of window 2.*{message}"):
        logprob_of(POSITION, drawn, end)


def test_what_runs_is_cancelled_by_an_interrupt() -> None:
    served = Served()
    run = served.run()

    def interrupt(done: int, total: int) -> None:
        if done == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(run, interrupt)
    for _ in range(20):
        served.wait(0.1)

    ends = served.rig.ledger.states(request.request_id for request in served.submitted)
    reasons = [state.finish_reason for state in ends.values()]
    assert len(reasons) == len(served.submitted) > 40
    assert None not in reasons
    assert FinishReason.ABORT in reasons
    assert served.rig.num_messages(BATCH_QUEUE) == 0


def test_a_request_that_failed_ends_the_run_and_the_others() -> None:
    served = Served()
    ids = windows_of().inputs.copy()
    ids[1, 3] = 30_000  # no token of this model
    run = served.run(Windows(ids, ids[:, FIRST + 1 :], FIRST, ids.size))

    with pytest.raises(PermanentError, match="of window 1 was not scored"):
        score(run)
    for _ in range(20):
        served.wait(0.1)

    states = served.rig.ledger.states(request.request_id for request in served.submitted)
    assert all(state.finish_reason for state in states.values())


def test_a_full_queue_and_a_lost_store_are_waited_for() -> None:
    served = Served()
    run = served.run()
    submit, look = served.producer.submit, served.producer.new_events
    failures: list[Exception] = [Overloaded("full", retry_after_s=2.0), StoreUnavailable("away")]

    def failing(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if len(served.submitted) == 50 and failures:
                raise failures.pop()
            return do(*args, **options)

        return call

    served.producer.submit = failing(submit)  # type: ignore[method-assign]
    served.producer.new_events = failing(look)  # type: ignore[method-assign]

    found = score(run)

    assert not failures
    assert found.perplexity.num_scored == len(served.submitted) == 93


def test_what_a_store_forgets_is_asked_for_again() -> None:
    served = Served()
    run = served.run(windows_of(1))
    while run.num_done < 5:
        run.turn()
    run.turn()
    served.rig.stores.meta.run(("FLUSHALL",))
    num_before = len(served.submitted)

    found = score(run)

    assert len(served.submitted) > num_before
    assert np.isfinite(found.perplexity.value)
    assert found.perplexity.num_scored == 31


def test_nobody_to_serve_is_told_at_once() -> None:
    served = Served(Rig(2))

    def nobody() -> None:
        raise TransientError("no scheduler runs")

    run = served.run(check=nobody)
    run.sleep = served.rig.clock.sleep

    with pytest.raises(TransientError, match="no scheduler runs"):
        score(run)


def test_a_window_longer_than_the_context_is_refused() -> None:
    run = Served().run()

    with pytest.raises(ConfigError, match="--window 64 is longer than the model's context of 63"):
        evaluate_served(run, max_positions=63, progress=lambda done, total: None)


def test_perplexity_of_losses() -> None:
    found = Perplexity.of(np.log(np.array([2.0, 8.0])))

    assert found.value == pytest.approx(4.0)
    assert found.mean_loss == pytest.approx(math.log(4))
    assert found.error == pytest.approx(4 * math.log(4) / 2)
    assert found.num_scored == 2
