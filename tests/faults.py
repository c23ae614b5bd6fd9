"""Parts that fail at a chosen moment: stand-ins before a real broker, ledger, store or kernel."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from shared.broker.base import Outgoing
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import ConfirmTimeout, StoreUnavailable

# Where a worker of a group may die: in which part, at which call. Only the last group commits.
CALLS = [
    (0, "kv_pages", "start_writes"),
    (0, "broker", "publish"),
    (0, "broker", "ack"),
    (1, "kv_pages", "start_writes"),
    (1, "ledger", "start_commits"),
    (1, "broker", "publish"),
    (1, "broker", "ack"),
]


class Crash(BaseException):
    """The process is gone; nothing after this line runs in it."""


class Tripwire:
    """Stands before `inner`; raises at the `nth` call of one method, before or after it ran.

    It fires `times` calls in a row (None: for ever), and counts the calls in `num_calls`.
    """

    def __init__(
        self,
        inner: Any,
        method: str,
        error: BaseException | type[BaseException],
        *,
        after: bool = False,
        nth: int = 1,
        times: int | None = 1,
        only_if: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        self.num_calls = 0
        self._inner = inner
        self._method = method
        self._error = error
        self._after = after
        self._first = nth
        self._end = None if times is None else nth + times
        self._only_if = only_if

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._guard(attribute) if name == self._method else attribute

    def arm(self) -> None:
        """Fire at the next call, whatever was said before."""
        self._first, self._end = self.num_calls + 1, self.num_calls + 2

    @property
    def has_fired(self) -> bool:
        return self.num_calls >= self._first

    def _guard(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._only_if(*args, **kwargs):
                return method(*args, **kwargs)
            self.num_calls += 1
            fires = self._first <= self.num_calls and (
                self._end is None or self.num_calls < self._end
            )
            if fires and not self._after:
                raise self._error
            result = method(*args, **kwargs)
            if fires:
                raise self._error
            return result

        return call


class Weather:
    """Stands before a store: fails the next calls of whatever method, as often as it is told."""

    def __init__(self, inner: Any) -> None:
        self.num_failures = 0
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.num_failures == 0:
                return method(*args, **kwargs)
            self.num_failures -= 1
            if self.num_failures % 2:
                method(*args, **kwargs)  # done, and the answer lost
            raise StoreUnavailable("bad weather")

        return call


class LosableBroker:
    """A connection that `lose` breaks and that is back at once, consuming what it did.

    What it held goes back to the queues, and its old deliveries are stale.
    """

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._inner = MemoryBroker(hub)
        self._consumed: dict[str, int] = {}

    def consume(self, queue: str, *, prefetch: int) -> None:
        self._consumed[queue] = prefetch
        self._inner.consume(queue, prefetch=prefetch)

    def lose(self) -> None:
        self._inner.close()
        self._inner = MemoryBroker(self._hub)
        for queue, prefetch in self._consumed.items():
            self._inner.consume(queue, prefetch=prefetch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DeafBroker:
    """A broker that swallows the publish calls numbered in `lost`: their confirm never comes."""

    def __init__(self, inner: Any, lost: Container[int]) -> None:
        self.num_calls = 0
        self._inner = inner
        self._lost = lost

    def publish(self, messages: Any) -> Any:
        self.num_calls += 1
        return _NoConfirm() if self.num_calls in self._lost else self._inner.publish(messages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _NoConfirm:
    def wait(self, timeout_s: float) -> None:
        raise ConfirmTimeout(f"no confirm within {timeout_s:g} s")


class LossyBroker:
    """A broker that confirms the messages numbered in `lost` and then forgets them, as a restart
    does with transient ones. Counts those that `only_if` picks; keeps all of these in `seen`.
    """

    def __init__(
        self,
        inner: Any,
        lost: Container[int] = (),
        *,
        only_if: Callable[[Outgoing], bool] = lambda _: True,
    ) -> None:
        self.seen: list[Outgoing] = []
        self._inner = inner
        self._lost = lost
        self._only_if = only_if

    def publish(self, messages: Sequence[Outgoing]) -> Any:
        kept = []
        for message in messages:
            if self._only_if(message):
                self.seen.append(message)
                if len(self.seen) in self._lost:
                    continue
            kept.append(message)
        return self._inner.publish(kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
