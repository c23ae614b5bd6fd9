"""A computation that does not end is noticed; one that does is not, however long it was frozen."""

from __future__ import annotations

from services.worker.watchdog import LOOKS_PER_LIMIT, Watchdog


def watched() -> tuple[Watchdog, list[float]]:
    hung: list[float] = []
    return Watchdog(30.0, on_hang=hung.append), hung


def look(watchdog: Watchdog, times: int) -> None:
    for _ in range(times):
        watchdog.look()


def test_a_computation_that_outlasts_the_limit_has_hung() -> None:
    watchdog, hung = watched()

    with watchdog.computing():
        look(watchdog, LOOKS_PER_LIMIT)
        assert hung == []
        look(watchdog, 2)

    assert hung == [30.0]


def test_many_short_computations_are_progress() -> None:
    watchdog, hung = watched()

    for _ in range(10):
        with watchdog.computing():
            look(watchdog, LOOKS_PER_LIMIT)

    assert hung == []


def test_an_idle_worker_has_not_hung() -> None:
    watchdog, hung = watched()
    with watchdog.computing():
        look(watchdog, 3)

    look(watchdog, 10 * LOOKS_PER_LIMIT)

    assert hung == []


def test_an_error_ends_the_computation() -> None:
    watchdog, hung = watched()
    try:
        with watchdog.computing():
            raise ValueError
    except ValueError:
        look(watchdog, 2 * LOOKS_PER_LIMIT)

    assert hung == []
