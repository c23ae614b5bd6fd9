"""Who waits for an answer that may never come is told, and may set an end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.cli.queue import Wait
from shared.errors import StoreUnavailable, TransientError
from tests.rig import FakeClock


class Known:
    """Stands for a session; knows the requests it is told of, and fails while it is `away`."""

    def __init__(self, *request_ids: str) -> None:
        self.request_ids = set(request_ids)
        self.away = False
        self.num_looks = 0
        self.producer = SimpleNamespace(states=self.states)

    def states(self, request_ids: list[str]) -> dict[str, object]:
        self.num_looks += 1
        if self.away:
            raise StoreUnavailable("away")
        return {i: object() for i in request_ids if i in self.request_ids}

    def check(self) -> None: ...


def wait_for(session: Known, clock: FakeClock, timeout_s: float) -> Wait:
    return Wait(session, "r", timeout_s=timeout_s, clock=clock)  # type: ignore[arg-type]


def test_an_unknown_id_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    wait = wait_for(Known(), FakeClock(), 0.0)

    wait.silence()
    wait.silence()

    assert capsys.readouterr().err.count("request r is not known") == 1


def test_one_that_is_known_is_waited_for_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    session = Known("r")
    wait = wait_for(session, FakeClock(), 0.0)

    wait.silence()
    wait.silence()

    assert capsys.readouterr().err == ""
    assert session.num_looks == 1


def test_a_store_that_is_away_says_nothing_of_an_id(capsys: pytest.CaptureFixture[str]) -> None:
    session = Known()
    session.away = True
    wait = wait_for(session, FakeClock(), 0.0)

    wait.silence()
    assert capsys.readouterr().err == ""
    session.away = False
    wait.silence()

    assert "not known" in capsys.readouterr().err


@pytest.mark.parametrize(("known", "state"), [("r", "has not ended"), ("other", "is not known")])
def test_a_wait_with_a_timeout_has_an_end(known: str, state: str) -> None:
    clock = FakeClock()
    wait = wait_for(Known(known), clock, 5.0)
    wait.silence()
    clock.sleep(5.0)

    with pytest.raises(TransientError, match=f"request r {state} after 5 s"):
        wait.silence()


def test_text_that_comes_does_not_put_the_end_off() -> None:
    clock = FakeClock()
    wait = wait_for(Known("r"), clock, 5.0)
    wait.check()
    clock.sleep(6.0)

    with pytest.raises(TransientError, match="has not ended after 5 s"):
        wait.check()
