"""What a server refuses again and again is tried again ever more slowly (exo#2112)."""

from __future__ import annotations

from shared.errors import StoreUnavailable
from shared.messages import Request
from shared.topology import REQUESTS_QUEUE
from tests.faults import Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, prompt_of

PROMPT = prompt_of(10)
AWAY = StoreUnavailable("no connection")


def test_requeue_backs_off() -> None:
    rig = Rig(1)
    away = Tripwire(rig.ledger, "get", AWAY, times=8)
    rig.add_scheduler(ledger=away)
    rig.add_workers()
    rig.submit(Request("r", token_ids=PROMPT, sampling=GREEDY))
    waits: list[float] = []

    while away.num_calls < 8:
        before_s = rig.clock.now_s
        calls = away.num_calls
        rig.turn()
        if away.num_calls > calls:
            waits.append(rig.clock.now_s - before_s)

    assert waits[-1] > 4 * waits[0]  # it grows ...
    assert max(waits) < 5.0  # ... and stays bounded
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    assert_answers(rig, [("r", PROMPT, GREEDY)])
