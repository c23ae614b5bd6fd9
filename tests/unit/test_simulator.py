"""What a simulated cluster does: nothing is lost, everything repeats, the policy decides."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from services.simulator.article import Article, compare, run_article, run_cellpipe
from services.simulator.draws import streams
from services.simulator.load import Asked, Bursty, Load, Poisson, Sizes, drawn_load, read_trace
from services.simulator.report import to_dict, to_lines
from services.simulator.simulation import Outcome, Simulation
from services.simulator.workers import SHORTLIST, Crowd, Worker
from services.simulator.world import (
    Domain,
    Experts,
    Failures,
    Group,
    Host,
    Kill,
    Network,
    Resize,
    Rules,
    WorkerSet,
    World,
    check_world,
)
from shared.errors import ConfigError
from shared.policy import RedriveLimits
from shared.router import choose_worker

GROUP = Group(turn_s=0.02, row_s=0.001, workers=(WorkerSet(4),), node_bytes=0.0)
CALM = World(groups=(GROUP,) * 3, num_spares=2, variation=0.1)
STORM = Failures(
    per_node_hour=20.0,
    outage_s=60.0,
    crashes_per_node_hour=40.0,
    restart_s=2.0,
    domains=(Domain("rack", 3, 4.0, 30.0),),
)


def simulate(
    world: World,
    *,
    num_requests: int = 200,
    per_s: float = 2.0,
    seed: int = 0,
    is_exact: bool | None = None,
) -> Outcome:
    rngs = streams(seed)
    load = drawn_load(
        Poisson(per_s),
        Sizes(40, 30, 0.5),
        num_requests,
        arrivals_rng=rngs["arrivals"],
        sizes_rng=rngs["sizes"],
    )
    horizon_s = num_requests / per_s
    return Simulation(world, load, horizon_s=horizon_s, seed=seed, is_exact=is_exact).run()


def one_request(world: World, num_tokens: int = 100) -> Outcome:
    load = Load((Asked(0.0, 8, num_tokens),))
    return Simulation(world, load, horizon_s=30.0).run()


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_however_much_fails(seed: int, is_exact: bool) -> None:
    outcome = simulate(replace(CALM, failures=STORM), seed=seed, is_exact=is_exact)

    figures = outcome.figures
    assert figures.num_node_failures + figures.num_process_deaths > 10
    assert figures.num_handovers + figures.num_redrives > 0
    assert outcome.lost == outcome.unfinished == 0
    assert figures.num_completed + figures.num_failed == figures.num_arrived == 200


def test_a_cluster_whose_scheduler_never_looks_loses_what_stood_still() -> None:
    blind = Rules(
        broker_notice_s=1e9, redrive=RedriveLimits(redrive_after_s=1e9, max_redrive_after_s=1e9)
    )
    world = replace(CALM, failures=replace(STORM, crashes_per_node_hour=0.0), rules=blind)

    outcome = simulate(world)

    assert outcome.lost + outcome.unfinished > 0


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_same_seed_gives_the_same_bytes(is_exact: bool) -> None:
    world = replace(CALM, failures=replace(STORM, flaky_per_node_hour=30.0))

    first, second, other = (
        json.dumps(to_dict(simulate(world, seed=seed, is_exact=is_exact))) for seed in (7, 7, 8)
    )

    assert first == second != other


def test_windows_and_single_events_give_the_same_times() -> None:
    exact, windows = (simulate(CALM, per_s=4.0, is_exact=is_exact) for is_exact in (True, False))

    assert exact.is_exact
    assert not windows.is_exact
    assert windows.figures.num_tokens == exact.figures.num_tokens
    for name in ("first_waits_s", "gaps_s", "whole_s"):
        expected = getattr(exact.figures, name).mean()
        assert getattr(windows.figures, name).mean() == pytest.approx(expected, rel=0.02)


def test_a_request_alone_takes_the_turns_of_all_groups_a_token() -> None:
    world = replace(CALM, variation=0.0)

    outcome = one_request(world)

    assert outcome.figures.gaps_s == pytest.approx(3 * 0.021)
    assert outcome.figures.num_redrives == 0


def test_a_killed_workers_step_is_handed_over_when_its_inbox_runs_out() -> None:
    world = replace(CALM, variation=0.0, failures=Failures(kills=(Kill(1.0, 0.0),), restart_s=5.0))

    outcome = one_request(world)

    assert outcome.figures.num_process_deaths == 1
    assert outcome.figures.num_handovers == 1
    assert outcome.figures.num_redrives == 0
    assert 0.5 < outcome.figures.gaps_s.max() < 0.6 + 3 * 0.021


def test_a_step_that_vanished_with_its_machine_is_driven_again() -> None:
    rack = Failures(domains=(Domain("all", 3, 3600.0, 1000.0),))
    world = replace(CALM, variation=0.0, failures=rack)

    outcome = one_request(world, 40)

    assert outcome.figures.num_redrives >= 1
    assert outcome.figures.gaps_s.max() < RedriveLimits().max_redrive_after_s


def test_a_group_without_workers_ends_its_requests_by_name() -> None:
    everything = Failures(domains=(Domain("everything", 14, 3600.0, 1e6),))

    outcome = one_request(replace(CALM, failures=everything), 1000)

    assert outcome.figures.failures == {"a layer group had no live worker": 1}
    assert outcome.lost == 0


def test_spares_take_the_places_of_the_dead() -> None:
    failures = Failures(per_node_hour=60.0, outage_s=1e6)
    few = replace(CALM, failures=failures, num_spares=0)

    without, spared = (simulate(replace(few, num_spares=n), num_requests=60) for n in (0, 12))

    assert without.figures.num_replaced == 0
    assert spared.figures.num_replaced > 0
    last = [outcome.figures.moments[-1].num_workers_up for outcome in (without, spared)]
    assert last[0] < last[1]


def test_a_dead_expert_holds_up_only_what_needs_it() -> None:
    experts = Experts(num_slots=8, copies=1, touched_share=0.25)
    group = replace(GROUP, experts=experts)
    failures = Failures(per_node_hour=20.0, outage_s=20.0)
    world = World(groups=(group,) * 2, failures=failures, variation=0.1)

    outcome = simulate(world, num_requests=100)

    assert outcome.figures.num_node_failures > 0
    assert outcome.figures.num_redrives > 0
    assert outcome.lost == 0
    assert outcome.figures.num_completed > 90


def test_a_flaky_worker_is_quarantined_and_its_steps_go_to_others() -> None:
    world = replace(CALM, failures=Failures(flaky_per_node_hour=10.0, flaky_share=0.9))

    outcome = simulate(world)

    assert outcome.figures.num_failed_steps > outcome.figures.num_quarantines > 0
    assert outcome.figures.num_completed == 200


def test_nodes_that_join_serve_and_nodes_that_are_drained_hold_up_nobody() -> None:
    world = replace(CALM, num_spares=0, resizes=(Resize(20.0, 6), Resize(60.0, -9)))

    outcome = simulate(world)

    up = [moment.num_workers_up for moment in outcome.figures.moments]
    assert (up[0], max(up), up[-1]) == (12, 18, 9)
    assert outcome.figures.num_completed == 200
    assert outcome.figures.num_redrives == 0


def test_processes_that_share_a_core_are_as_fast_as_it_is() -> None:
    load = Load(tuple(Asked(0.0, 1, 50) for _ in range(8)), concurrency=8)
    world = replace(CALM, variation=0.0, host=Host(cores=2))

    outcome = Simulation(world, load, horizon_s=60.0).run()

    assert outcome.utilisation * outcome.num_workers <= 2.0
    assert outcome.figures.num_completed == 8


def test_no_more_run_at_once_than_the_budget_lets_in() -> None:
    world = replace(CALM, rules=Rules(max_in_flight=3))

    outcome = simulate(world, per_s=20.0)

    assert max(moment.num_running for moment in outcome.figures.moments) == 3
    assert max(moment.num_waiting for moment in outcome.figures.moments) > 0
    assert outcome.figures.num_completed == 200


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    world = replace(CALM, rules=Rules(max_in_flight=1, max_queued=5))

    outcome = simulate(world, per_s=50.0)

    assert outcome.figures.num_refused > 0
    assert outcome.figures.num_completed == 200 - outcome.figures.num_refused


@pytest.mark.parametrize("seed", range(20))
def test_a_short_list_gives_the_worker_that_the_policy_chooses_of_all(seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd(0)
    for index in range(SHORTLIST * 10):
        crowd.add(Worker(index, 0, 1, 0.01 * rng.choice((1, 1, 3)), 0.0))
    for worker in crowd.workers:
        for _ in range(rng.randrange(4)):
            crowd.counts(worker, 1)
        if rng.random() < 0.3:
            worker.set_turn(rng.uniform(0.0, 2.0), 3.0, rng.randrange(1, 9))
        if rng.random() < 0.1:
            worker.stops(0.0, is_noticed=False, broker_notice_s=30.0, phase=rng.random())
    usual = rng.choice([None, *crowd.workers])

    chosen = crowd.choose(usual, None, 1.0)

    peers = [worker.peer(1.0) for worker in crowd.workers]
    expected = choose_worker(0, usual.worker_id if usual else "", peers)
    assert chosen is not None
    assert chosen.worker_id == expected


def test_the_articles_world_loses_what_fails_four_times_and_cellpipe_loses_nothing() -> None:
    article = Article(num_tasks=4_000)

    theirs, ours, as_often = compare(article)

    expected = article.num_tasks * article.expected_lost_share
    assert article.expected_lost_share == pytest.approx(0.15**4)
    assert theirs.lost == pytest.approx(expected, abs=4 * expected**0.5 + 1)
    assert theirs.done + theirs.lost == article.num_tasks
    for row in (ours, as_often):
        assert row.lost == 0
        assert row.done + row.failed == article.num_tasks
    poison = article.num_tasks * article.crash_share**3
    assert ours.failed == pytest.approx(poison, abs=4 * poison**0.5 + 1)


def test_without_crashes_both_do_all_in_one_attempt() -> None:
    article = Article(crash_share=0.0, num_tasks=500)

    theirs, (ours, _) = run_article(article), run_cellpipe(article)

    assert theirs.done == theirs.attempts == ours.done == ours.attempts == 500
    assert ours.mean_s == pytest.approx(theirs.mean_s, rel=0.02)


def test_bursts_bring_as_many_in_all_and_more_at_once() -> None:
    rng = streams(3)["arrivals"]
    even, bursts = Poisson(10.0).times(20_000, rng), Bursty(10.0).times(20_000, rng)

    def peak(times: list[float]) -> float:
        return max(sum(a <= t < a + 10 for t in times) for a in range(0, 600, 10)) / 10

    assert bursts == sorted(bursts)
    assert bursts[-1] == pytest.approx(even[-1], rel=0.25)
    assert peak(bursts) > 2 * peak(even)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at_s,prompt,answer\n2.5,10,20\n0.5,1,2\n")

    assert read_trace(path).asked == (Asked(0.5, 1, 2), Asked(2.5, 10, 20))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("at_s,prompt\n1,2\n", "'answer'"),
        ("at_s,prompt,answer\n1,2,x\n", "line 2: answer"),
        ("at_s,prompt,answer\n1,0,3\n", "line 2: prompt"),
        ("at_s,prompt,answer\nnan,1,3\n", "line 2: at_s"),
        ("at_s,prompt,answer\n", "no requests"),
    ],
)
def test_a_trace_that_cannot_be_read_names_line_and_field(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)

    with pytest.raises(ConfigError, match=named):
        read_trace(path)


@pytest.mark.parametrize(
    ("world", "named"),
    [
        (replace(CALM, groups=()), "group"),
        (replace(CALM, groups=(replace(GROUP, turn_s=-1.0),)), r"groups\[0\].turn_s.*-1"),
        (replace(CALM, groups=(replace(GROUP, workers=()),)), r"groups\[0\].workers.*0"),
        (replace(CALM, num_spares=-1), "num_spares.*-1"),
        (replace(CALM, variation=float("nan")), "variation.*nan"),
        (replace(CALM, failures=Failures(crash_share=1.5)), "crash_share.*1.5"),
    ],
)
def test_a_world_that_cannot_be_names_the_field_and_the_value(world: World, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_world(world)


def test_the_report_tells_all_requests_apart() -> None:
    outcome = simulate(CALM, num_requests=20)

    seen, lines = to_dict(outcome), to_lines(outcome)

    assert seen["requests"]["completed"] == 20
    assert len(seen["over_time"]) == 60
    assert seen["tokens"] == outcome.figures.num_tokens
    assert lines[-1] == "nothing lost"


def test_lost_packets_are_as_many_as_their_share_says() -> None:
    group = replace(GROUP, moved_bytes=1000.0)
    network = Network(loss=0.02, retransmit_s=10.0)
    world = World(groups=(group,) * 3, network=network, variation=0.0)
    load = Load((Asked(0.0, 1, 4_000),))

    outcome = Simulation(world, load, horizon_s=60.0).run()

    num_hops = 3 * 4_000
    waited_s = outcome.figures.whole_s[0] - num_hops * 0.021
    assert waited_s / 10.0 == pytest.approx(num_hops * 0.02, rel=0.2)


def test_windows_send_every_slice_of_a_prompt_also_where_one_group_is_all() -> None:
    world = World((Group(turn_s=0.01, row_s=0.001, workers=(WorkerSet(2),)),))
    load = Load(tuple(Asked(0.1 * number, 300, 4) for number in range(20)))

    outcome = Simulation(world, load, horizon_s=60.0, is_exact=False).run()

    assert outcome.lost == 0
    assert outcome.figures.num_completed == 20
