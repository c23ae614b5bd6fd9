"""The world that is made from a plan is that plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.cli.simulated_world import without_spares, world_of
from services.planner.library import builtin_library
from services.planner.plan import Plan, make_plan
from services.planner.question import Question
from services.planner.specs import Pool
from services.simulator.load import Asked, Load
from services.simulator.simulation import Simulation
from services.simulator.world import World, check_world
from shared.errors import ConfigError

CASES = [
    ("smollm2-135m", "rpi5:12"),
    ("llama-3.1-8b", "ps3:400"),
    ("llama-3.1-8b", "rpi5:8,old-pc:4"),
    ("kimi-k2", "ps3:12000"),
]


def planned(model: str, pool: str, spares: int) -> tuple[Plan, Pool, World]:
    library = builtin_library()
    whole = library.parse_pool(pool)
    plan = make_plan(library.model(model), without_spares(whole, spares), Question())
    assert isinstance(plan, Plan)
    return plan, whole, world_of(plan, whole, position=plan.demand.context)


@pytest.mark.parametrize(("model", "pool"), CASES)
def test_it_has_the_plans_stages_and_every_node_of_the_pool(model: str, pool: str) -> None:
    plan, whole, world = planned(model, pool, 2)

    assert check_world(world) is world
    assert len(world.groups) == len(plan.placement.stages)
    assert world.num_nodes == whole.num_nodes
    assert world.num_spares >= 2
    assert sum(group.num_nodes for group in world.groups) == plan.placement.num_nodes


@pytest.mark.parametrize(("model", "pool"), CASES)
def test_a_request_alone_is_as_fast_as_the_plan_says(model: str, pool: str) -> None:
    plan, _, world = planned(model, pool, 2)
    calm = replace(world, failures=replace(world.failures, per_node_hour=0.0, domains=()))
    calm = replace(calm, network=replace(calm.network, loss=0.0), variation=0.0)
    load = Load((Asked(0.0, 4, 40),))

    outcome = Simulation(calm, load, horizon_s=60.0).run()

    # Where packets are lost, the plan's hops have the expected wait for them: up to 3 %.
    rel = 0.03 if world.network.loss else 1e-6
    assert outcome.figures.gaps_s.mean() == pytest.approx(plan.times.alone.total, rel=rel)


def test_failures_are_those_of_the_specs_unless_they_are_given() -> None:
    plan, whole, world = planned("kimi-k2", "ps3:12000", 100)

    assert world.failures.per_node_hour == pytest.approx(whole.failures_per_hour / 12_000)
    assert world_of(plan, whole, position=1, failures_per_hour=0.5).failures.per_node_hour == 0.5
    assert [domain.num_nodes for domain in world.failures.domains] == [40, 750, 2000]


@pytest.mark.parametrize("spares", [-1, 12, 100])
def test_spares_that_leave_no_node_are_refused(spares: int) -> None:
    pool = builtin_library().parse_pool("rpi5:12")

    with pytest.raises(ConfigError, match=f"--spares.*{spares}"):
        without_spares(pool, spares)


def test_spares_are_taken_of_each_kind_alike() -> None:
    pool = builtin_library().parse_pool("rpi5:60,old-pc:40")

    left = without_spares(pool, 10)

    assert {kind.node.name: kind.count for kind in left.nodes} == {"rpi5": 54, "old-pc": 36}
