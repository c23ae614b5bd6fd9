"""What a token costs beside attention does not grow with the context that it stands in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.messages import Request
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from tests.rig import Rig
from tests.rig_model import GREEDY, prompt_of


class Counting:
    """A connection that counts what is asked of the server behind it."""

    def __init__(self, connection: Any) -> None:
        self.num_commands = 0
        self.num_bytes = 0
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def run(self, command: Any) -> Any:
        reply = self._connection.run(command)
        self._note(command, reply)
        return reply

    def run_all(self, commands: Any, **options: Any) -> Any:
        replies = self._connection.run_all(commands, **options)
        for command, reply in zip(commands, replies, strict=True):
            self._note(command, reply)
        return replies

    def start_all(self, commands: Any, **options: Any) -> Any:
        wait = self._connection.start_all(commands, **options)

        def wait_and_note() -> Any:
            replies = wait()
            for command, reply in zip(commands, replies, strict=True):
                self._note(command, reply)
            return replies

        return wait_and_note

    def _note(self, command: Any, reply: Any) -> None:
        self.num_commands += 1
        words = command if isinstance(command, tuple) else (*command.keys, *command.args)
        sizes = (len(w if isinstance(w, bytes | memoryview) else str(w)) for w in words)
        self.num_bytes += sum(sizes)
        self.num_bytes += len(reply) if isinstance(reply, bytes) else len(str(reply))


def asked(num_prompt: int, max_tokens: int) -> tuple[int, int]:
    """Commands and bytes between the workers and the store for a whole request."""
    rig = Rig(2)
    kv, meta = Counting(rig.stores.kv), Counting(rig.stores.meta)
    row_bytes = rig.config.kv_row_bytes_per_layer
    for group in range(2):
        rig.add_worker(
            group,
            kv_pages=KvPages.of_layout(kv, rig.layout, row_bytes),  # type: ignore[arg-type]
            ledger=Ledger(meta),  # type: ignore[arg-type]
        )
    scheduler = rig.add_scheduler()
    sampling = replace(GREEDY, max_tokens=max_tokens)
    rig.submit(Request("r", token_ids=prompt_of(num_prompt), sampling=sampling))
    rig.run_until(lambda: scheduler.num_answered == 1)
    return kv.num_commands + meta.num_commands, kv.num_bytes + meta.num_bytes


def test_a_token_asks_as_much_of_the_store_at_200_positions_as_at_20() -> None:
    costs = []
    for num_prompt in (20, 20 + 11 * 16):  # the same place in a page
        short, long = asked(num_prompt, 5), asked(num_prompt, 37)
        costs.append((long[0] - short[0], long[1] - short[1]))

    (commands_20, bytes_20), (commands_196, bytes_196) = costs
    assert commands_196 == commands_20 > 0
    assert bytes_196 == pytest.approx(bytes_20, rel=0.02)  # positions have a digit more
