"""Requests that begin alike share KV pages, and nobody can tell from the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from services.worker.worker import Worker
from shared.errors import StoreUnavailable
from shared.messages import FinishReason, Request, SamplingParams
from shared.store import keys
from shared.store.kv_pages import PAGE_ROWS
from shared.store.leftovers import leftover_keys
from shared.store.prefix_pages import page_digests
from shared.topology import REQUESTS_QUEUE
from tests.faults import Crash, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of, rig_model

SYSTEM = prompt_of(70)  # four full pages, and six tokens
FIRST, SECOND, THIRD = (SYSTEM + prompt_of(9, salt=n) for n in (1, 2, 3))
NUM_SHARED = 64


def make_rig(num_groups: int = 2, *, embedded: bool = False, **changes: int | None) -> Rig:
    rig = Rig(num_groups, embedded=embedded, **changes)
    rig.open_reply_queue("replies")
    rig.add_workers()
    return rig


def ask(
    rig: Rig, request_id: str, prompt: Sequence[int], sampling: SamplingParams = SAMPLED
) -> int:
    """Ask and wait for the end and the reply; how many tokens were cached."""
    rig.submit(Request(request_id, token_ids=tuple(prompt), sampling=sampling), reply_to="replies")
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    (reply,) = rig.replies("replies")
    (final,) = rig.final_events(request_id)
    num_cached = rig.record(request_id).num_cached
    assert reply.error == ""
    assert list(reply.token_ids) == expected_tokens(tuple(prompt), sampling)
    assert reply.num_cached_tokens == final.num_cached == num_cached
    return num_cached


def page_bytes() -> int:
    """Of one page in all groups."""
    config = rig_model().config
    return config.num_hidden_layers * config.kv_row_bytes_per_layer * PAGE_ROWS


def workers_of(rig: Rig) -> list[Worker]:
    return [actor for actor in rig.actors if isinstance(actor, Worker)]


def shared_keys(rig: Rig) -> list[str]:
    names = rig.stores.kv.run(("KEYS", f"{keys.PREFIX}prefix:*"))
    return sorted(name.decode() for name in names)


def page_keys(rig: Rig, prompt: Sequence[int], group: int) -> list[str]:
    digests = page_digests(rig.layout, prompt)
    return [keys.prefix_page(rig.layout.layout_id, group, digest) for digest in digests]


def replace_workers(rig: Rig, workers: Sequence[Worker]) -> list[Worker]:
    """Kill them and start as many: none knows a row."""
    for worker in workers:
        rig.kill(worker)
    return [rig.add_worker(*worker.groups) for worker in workers]


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_request_begins_after_what_it_shares(num_groups: int, embedded: bool) -> None:
    rig = make_rig(num_groups, embedded=embedded)
    rig.add_scheduler()

    assert ask(rig, "first", FIRST) == 0
    assert ask(rig, "second", SECOND) == NUM_SHARED
    assert ask(rig, "third", THIRD, GREEDY) == NUM_SHARED
    assert ask(rig, "other", prompt_of(70, salt=5)) == 0


@pytest.mark.parametrize("embedded", [False, True])
def test_without_a_prefix_cache_every_prompt_is_computed(embedded: bool) -> None:
    rig = make_rig(2, embedded=embedded, prefix_bytes=None)
    rig.add_scheduler()

    assert [ask(rig, name, FIRST) for name in ("first", "second")] == [0, 0]
    assert shared_keys(rig) == []


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize(
    ("length", "num_cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_the_last_token_of_a_prompt_is_always_computed(
    embedded: bool, length: int, num_cached: int
) -> None:
    rig = make_rig(2, embedded=embedded)
    rig.add_scheduler()

    assert ask(rig, "first", prompt_of(length)) == 0
    assert ask(rig, "again", prompt_of(length), GREEDY) == num_cached


@pytest.mark.parametrize("embedded", [False, True])
def test_a_next_turn_begins_after_the_answer_of_the_last(embedded: bool) -> None:
    rig = make_rig(2, embedded=embedded)
    rig.add_scheduler()
    sampling = replace(SAMPLED, max_tokens=30)
    prompt = prompt_of(40)

    ask(rig, "first", prompt, sampling)
    turn = [*prompt, *rig.tokens("first"), *prompt_of(20, salt=2)]

    assert ask(rig, "second", turn) == (40 + 30 - 1) // PAGE_ROWS * PAGE_ROWS


def test_what_differs_early_shares_nothing_behind_it() -> None:
    rig = make_rig()
    rig.add_scheduler()
    ask(rig, "first", FIRST)
    changed = list(FIRST)
    changed[20] += 1

    assert ask(rig, "second", changed) == 16  # the same tokens in pages 2 and 3 mean other rows


def test_workers_that_know_nothing_begin_after_what_others_computed() -> None:
    rig = Rig(2)
    rig.open_reply_queue("replies")
    workers = rig.add_workers(per_group=2)
    rig.add_scheduler()
    ask(rig, "first", FIRST)

    replace_workers(rig, workers)

    assert ask(rig, "second", SECOND) == NUM_SHARED


def test_a_prompt_is_shared_while_its_answer_still_runs() -> None:
    # given a request whose answer has begun, its own pages moved
    rig = make_rig(2)
    scheduler = rig.add_scheduler()
    workers = workers_of(rig)
    sampling = replace(SAMPLED, max_tokens=60)
    rig.submit(Request("first", token_ids=FIRST, sampling=sampling))
    rig.run_until(lambda: len(shared_keys(rig)) == 2 * 4 and len(rig.tokens("first")) >= 8)

    # when another comes, and all who know a row of either die
    rig.submit(Request("second", token_ids=SECOND, sampling=SAMPLED))
    rig.run_until(lambda: len(rig.tokens("second")) >= 3)
    assert rig.record("first").finish_reason is None
    replace_workers(rig, workers)
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert rig.record("second").num_cached == NUM_SHARED
    assert_answers(rig, [("first", FIRST, sampling), ("second", SECOND, SAMPLED)])


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("page", [0, 2])
@pytest.mark.parametrize("damage", ["gone", "short", "another type", "not finite"])
def test_a_shared_page_that_cannot_be_read_is_computed_again(
    group: int, page: int, damage: str
) -> None:
    # given a request that was started, before any worker has read what it shares
    rig = make_rig(2)
    scheduler = rig.add_scheduler()
    ask(rig, "first", FIRST)
    workers = workers_of(rig)
    for worker in workers:
        rig.kill(worker)
    rig.submit(Request("second", token_ids=SECOND, sampling=SAMPLED), reply_to="replies")
    rig.run_until(lambda: rig.num_steps() == 1)
    assert rig.record("second").num_cached == NUM_SHARED

    key = page_keys(rig, SYSTEM, group)[page]
    match damage:
        case "gone":
            rig.stores.kv.run(("DEL", key))
        case "short":
            half = rig.stores.kv.run(("GETRANGE", key, 0, 100))
            rig.stores.kv.run(("SET", key, half))
        case "another type":
            rig.stores.kv.run(("DEL", key))
            rig.stores.kv.run(("HSET", key, "a", "b"))
        case _:
            rig.stores.kv.run(("SETRANGE", key, 10, b"\xff" * 64))
    for worker in workers:
        rig.add_worker(*worker.groups)
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert_answers(rig, [("second", SECOND, SAMPLED)])
    assert scheduler.num_redrives >= 1
    rig.replies("replies")
    assert ask(rig, "third", THIRD) == NUM_SHARED  # and is shared again


def test_the_whole_kv_store_may_be_lost_at_any_time() -> None:
    rig = make_rig(3)
    scheduler = rig.add_scheduler()
    ask(rig, "first", FIRST)
    rng = random.Random(1)
    names = [f"r{n}" for n in range(6)]
    prompts = {name: SYSTEM + prompt_of(10 + n, salt=n) for n, name in enumerate(names)}
    for name in names:
        rig.submit(Request(name, token_ids=prompts[name], sampling=SAMPLED))

    while scheduler.num_in_flight or rig.num_messages(REQUESTS_QUEUE):
        rig.turn()
        if rng.random() < 0.02:
            pages = [k for k in rig.stores.kv.run(("KEYS", f"{keys.PREFIX}*")) if b":kv:" in k]
            for name in [*pages, *shared_keys(rig)]:
                rig.stores.kv.run(("DEL", name))

    assert_answers(rig, [(name, prompts[name], SAMPLED) for name in names])


def test_the_pages_used_longest_ago_go_first() -> None:
    budget_bytes = 6 * page_bytes()
    rig = make_rig(2, prefix_bytes=budget_bytes)
    rig.add_scheduler()
    old, young = prompt_of(40, salt=1), prompt_of(40, salt=2)  # three pages with the answer
    ask(rig, "old", old)
    ask(rig, "young", young)
    assert ask(rig, "used", old) == 32

    ask(rig, "new", prompt_of(40, salt=3))

    assert rig.prefixes.num_bytes() <= budget_bytes
    assert len(shared_keys(rig)) <= 6 * 2
    assert ask(rig, "old-again", old) == 32
    assert ask(rig, "young-again", young) == 0


@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_a_budget_smaller_than_a_prompt_keeps_what_fits(num_pages: int) -> None:
    rig = make_rig(2, prefix_bytes=num_pages * page_bytes())
    rig.add_scheduler()

    ask(rig, "first", FIRST)

    assert rig.prefixes.num_bytes() == num_pages * page_bytes()
    assert ask(rig, "second", SECOND) == num_pages * PAGE_ROWS


def test_shared_pages_are_no_leak_and_live_for_a_time() -> None:
    rig = make_rig(2)
    rig.add_scheduler()
    ask(rig, "first", FIRST)
    ask(rig, "second", SECOND)

    names = shared_keys(rig)

    assert leftover_keys(rig.stores, ["first", "second"]) == []
    num_bytes = sum(rig.stores.kv.run(("STRLEN", name)) for name in names)
    assert num_bytes == rig.prefixes.num_bytes() > 0
    for name in [*names, keys.prefix_uses(rig.layout.model_id, rig.layout.layout_id)]:
        assert 0 < rig.stores.kv.run(("PTTL", name)) <= 3_600_000


def test_a_request_that_failed_shares_no_answer() -> None:
    rig = make_rig(2)
    scheduler = rig.add_scheduler()
    rig.submit(Request("bad", token_ids=prompt_of(40), sampling=replace(SAMPLED, max_tokens=60)))
    rig.run_until(lambda: len(rig.tokens("bad")) >= 30)
    before = shared_keys(rig)

    rig.ledger.finish("bad", FinishReason.ERROR, "it broke")
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert shared_keys(rig) == before
    assert len(before) == 2 * 2


def test_a_cancelled_request_shares_what_it_has() -> None:
    rig = make_rig(2)
    scheduler = rig.add_scheduler()
    rig.submit(Request("gone", token_ids=prompt_of(40), sampling=replace(SAMPLED, max_tokens=60)))
    rig.run_until(lambda: len(rig.tokens("gone")) >= 30)

    rig.ledger.finish("gone", FinishReason.ABORT)
    rig.run_until(lambda: scheduler.num_in_flight == 0)
    rig.run_until_quiet()

    assert len(shared_keys(rig)) >= 2 * 4
    assert leftover_keys(rig.stores, ["gone"]) == []


def test_shared_rows_are_not_reserved_twice_and_are_once_they_are_lost() -> None:
    rig = make_rig(2)
    scheduler = rig.add_scheduler(limits=SchedulerLimits(poll_s=0.01))
    per_position = rig.config.num_hidden_layers * rig.config.kv_row_bytes_per_layer
    ask(rig, "first", FIRST)
    workers = workers_of(rig)
    for worker in workers:
        rig.kill(worker)
    rig.submit(Request("second", token_ids=SECOND, sampling=SAMPLED))
    all_rows = len(SECOND) + SAMPLED.max_tokens - 1
    rig.run_until(lambda: scheduler.reserved_kv_bytes > 0)
    assert scheduler.reserved_kv_bytes == (all_rows - NUM_SHARED) * per_position

    for name in shared_keys(rig):
        rig.stores.kv.run(("DEL", name))
    for worker in workers:
        rig.add_worker(*worker.groups)
    rig.run_until(lambda: scheduler.num_redrives > 0)
    rig.turn()

    assert scheduler.reserved_kv_bytes == all_rows * per_position
    rig.run_until(lambda: scheduler.num_in_flight == 0)
    assert_answers(rig, [("second", SECOND, SAMPLED)])


def test_a_store_that_takes_no_shared_pages_holds_up_no_answer() -> None:
    rig = make_rig(2)
    full = Tripwire(rig.prefixes, "share", StoreUnavailable("full"), times=None)
    rig.add_scheduler(prefix_pages=full)

    assert ask(rig, "first", FIRST) == 0
    assert full.num_calls == 2
    assert leftover_keys(rig.stores, ["first"]) == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["attach", "share"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_scheduler_that_dies_while_it_shares_leaves_a_request_that_is_answered(
    method: str, nth: int, after: bool
) -> None:
    rig = make_rig(2)
    dying = Tripwire(rig.prefixes, method, Crash, nth=nth, after=after)
    rig.add_scheduler(prefix_pages=dying)
    for name, prompt in (("first", FIRST), ("second", SECOND)):
        rig.submit(Request(name, token_ids=prompt, sampling=SAMPLED), reply_to="replies")
    rig.run_until(lambda: rig.num_crashes == 1)

    heir: Scheduler = rig.add_scheduler()
    rig.run_until(lambda: heir.num_in_flight == 0 and rig.num_messages(REQUESTS_QUEUE) == 0)

    assert {reply.request_id for reply in rig.replies("replies")} == {"first", "second"}
    assert_answers(rig, [("first", FIRST, SAMPLED), ("second", SECOND, SAMPLED)])
    assert leftover_keys(rig.stores, ["first", "second"]) == []


def test_garbled_use_times_cost_the_cache_and_nothing_else() -> None:
    rig = make_rig(2)
    rig.add_scheduler()
    ask(rig, "first", FIRST)
    uses = keys.prefix_uses(rig.layout.model_id, rig.layout.layout_id)
    rig.stores.kv.run(("SET", uses, "garbage"))

    assert ask(rig, "second", SECOND) == 0
    assert ask(rig, "third", THIRD) == NUM_SHARED
