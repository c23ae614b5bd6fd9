"""Plans: the article's numbers, memory, impossible ones, and what holds for every pool."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.planner.bill import bill, kwh_a_year
from services.planner.failures import at_most_down, down_share, mtbf_s
from services.planner.html import check_html, rate_curve, to_html
from services.planner.library import Library, builtin_library
from services.planner.load import limits
from services.planner.missing import Impossible
from services.planner.network import Link, hops_s, mean_latency_s, tier_shares
from services.planner.placement import Wishes
from services.planner.plan import Plan, make_plan
from services.planner.question import Question, demand_of
from services.planner.racks import rack_copies, spread_of
from services.planner.report import headline, impossible_lines, sections
from services.planner.report_dict import impossible_dict, plan_dict
from services.planner.search import Search, search
from services.planner.slices import room_bytes
from services.planner.specs import NodeCount, Pool
from services.planner.stages import Stage, Strategy
from services.planner.timing import all_reduce, busiest_load, kernel_seconds
from shared.errors import ConfigError
from shared.topology import Wire

LIBRARY = builtin_library()
SMALL = ("smollm2-135m", "llama-3.1-8b", "qwen3-30b-a3b")
KINDS = ("ps3", "rpi5", "old-pc", "mini-pc", "m4-mini")


def plan(model: str, pool: str, **asked: object) -> Plan:
    found = answer(model, pool, **asked)
    assert isinstance(found, Plan), impossible_lines(found)
    return found


def answer(model: str, pool: str, **asked: object) -> Plan | Impossible:
    return make_plan(LIBRARY.model(model), LIBRARY.parse_pool(pool), Question(**asked))  # type: ignore[arg-type]


# The article's bill.


def test_a_hundred_thousand_consoles_cost_77_million_yuan_a_year() -> None:
    found = plan("kimi-k2", "ps3:100000").bill

    assert found.watts == 100_000 * 175
    assert found.kwh_a_year == pytest.approx(1.533e8, rel=1e-12)
    assert found.cost_a_year == pytest.approx(76.65e6, rel=1e-12)
    assert round(found.cost_a_year / 1e6) == 77


def test_a_console_fails_each_36_seconds() -> None:
    found = plan("kimi-k2", "ps3:100000").failures

    assert found.per_hour == pytest.approx(100, rel=1e-12)
    assert found.mtbf_s == pytest.approx(36, rel=1e-12)


def test_30_hops_of_a_millisecond_are_30() -> None:
    assert hops_s(30, 1e-3) == pytest.approx(30e-3, rel=1e-12)
    article = LIBRARY.network("article")
    assert hops_s(30, mean_latency_s(article, 100_000)) == pytest.approx(30e-3, rel=1e-12)


def test_energy_and_price_of_tokens() -> None:
    found = bill(1000, 10, price_per_kwh=0.5, currency="yuan")

    assert found.joules_a_million_tokens == 1e8
    assert found.cost_a_million_tokens == pytest.approx(1e8 / 3.6e6 * 0.5)
    assert kwh_a_year(1000) == 8760


# Memory.


def test_k2_keeps_trunks_whole_and_k3_says_that_it_splits_them() -> None:
    k2, k3 = plan("kimi-k2", "ps3:100000"), plan("kimi-k3", "ps3:100000")

    def trunks(found: Plan) -> list[Stage]:
        return [s for s in found.placement.stages if s.expert_node is not None]

    assert {stage.width for stage in trunks(k2)} == {1}
    assert min(stage.width for stage in trunks(k3)) > 1
    told = " ".join(note for section in sections(k3) for note in section.notes)
    assert "the trunk of layers 1-2" in told
    assert "does not fit one ps3" in told


@pytest.mark.parametrize("model", ["kimi-k2", "kimi-k3"])
def test_embedding_and_head_are_split_where_no_node_holds_them(model: str) -> None:
    stages = plan(model, "ps3:100000").placement.stages

    assert stages[0].embeds
    assert stages[0].width > 1
    assert stages[-1].has_head
    assert stages[-1].width > 1
    wishes = Wishes(strategy=Strategy.PIPELINE)
    whole = plan("kimi-k2", "a100:16", wishes=wishes).placement.stages
    assert whole[0].width == whole[-1].width == 1


def test_fast_nodes_get_more_layers() -> None:
    wishes = Wishes(strategy=Strategy.PIPELINE)
    found = plan("llama-3.1-8b", "rpi5:2,m4-mini:2", wishes=wishes)
    layers = {"rpi5": 0, "m4-mini": 0}
    for stage in found.placement.stages:
        layers[stage.node.name] += stage.num_layers

    assert layers["m4-mini"] > layers["rpi5"]


def test_two_kinds_carry_more_than_either_alone() -> None:
    both = plan("llama-3.1-8b", "rpi5:8,old-pc:4").tokens_per_s

    assert both > plan("llama-3.1-8b", "rpi5:8").tokens_per_s
    assert both > plan("llama-3.1-8b", "old-pc:4").tokens_per_s


# Impossible plans.


def test_nodes_that_are_missing_are_told_and_are_enough() -> None:
    found = answer("kimi-k2", "ps3:1000")
    assert isinstance(found, Impossible)
    (change,) = found.changes

    ((kind, more),) = change.add_nodes
    assert kind == "ps3"
    assert isinstance(answer("kimi-k2", f"ps3:{1000 + more}"), Plan)
    assert isinstance(answer("kimi-k2", f"ps3:{1000 + more - 1}"), Impossible)
    assert "layer 0 needs 316 MB of a ps3" in found.reasons["pipeline"]
    assert f"it would with {more:,} more ps3" in impossible_lines(found)[-1]


def test_fewer_bits_or_a_shorter_context_are_offered_and_do() -> None:
    for asked in ({"bits": 16}, {"context": 131072}):
        found = answer("llama-3.1-8b", "rpi5:1", **asked)
        assert isinstance(found, Impossible)
        tried = [change for change in found.changes if change.question is not None]

        assert tried
        for change in tried:
            assert change.question is not None
            assert isinstance(make_plan(found.model, found.pool, change.question), Plan)


def test_memory_is_asked_for_where_nodes_do_not_help() -> None:
    library = builtin_library()
    tiny = replace(library.node("ps3"), memory_bytes=20_000_000, name="tiny")
    pool = Pool("tiny:50", (NodeCount(tiny, 50),), library.network("gigabit"),
                library.server("measured"))  # fmt: skip

    wishes = Wishes(strategy=Strategy.PIPELINE)
    found = make_plan(library.model("llama-3.1-8b"), pool, Question(wishes=wishes, context=64,
                                                                    prompt=8))  # fmt: skip

    assert isinstance(found, Impossible)
    assert "of memory on each tiny" in found.changes[-1].what


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"prompt": 5000}, r"--prompt must be in 1\.\.4096"),
        ({"wishes": Wishes(groups=99)}, r"--groups must be in 1\.\.30 .* got 99"),
        ({"wishes": Wishes(concurrency=0)}, "--concurrency must be 1 or more, got 0"),
        ({"bits": 3}, "--bits must be 4, 8 or 16, got 3"),
        ({"context": 100_000, "prompt": 1}, r"--context must be in 1\.\.8192"),
    ],
)
def test_values_that_no_plan_has_are_refused(asked: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        answer("smollm2-135m", "rpi5:1", **asked)


# What holds for every pool.

pools = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 40), min_size=1, max_size=2)
models = st.sampled_from(SMALL)
some_wishes = st.builds(
    Wishes,
    concurrency=st.none() | st.integers(1, 100),
    spares=st.integers(0, 1),
)
QUIET = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def pool_of(numbers: dict[str, int]) -> Pool:
    kinds = [NodeCount(LIBRARY.node(name), n) for name, n in numbers.items()]
    return Pool("any", tuple(kinds), LIBRARY.network("gigabit"), LIBRARY.server("measured"))


def rate(model: str, numbers: dict[str, int], wished: Wishes) -> float:
    best = searched(model, pool_of(numbers), wished).best
    return best.tokens_per_s if best else 0.0


def searched(model: str, pool: Pool, wished: Wishes) -> Search:
    question = Question(context=1024, prompt=64, wishes=wished)
    return search(demand_of(LIBRARY.model(model), question), pool, Wire.F32, wished)


@given(models, pools, some_wishes, st.sampled_from(KINDS), st.integers(1, 20))
@QUIET
def test_more_nodes_never_carry_less(
    model: str, numbers: dict[str, int], wished: Wishes, kind: str, more: int
) -> None:
    grown = {**numbers, kind: numbers.get(kind, 0) + more}

    assert rate(model, grown, wished) >= rate(model, numbers, wished) * (1 - 1e-9)


@given(models, pools, some_wishes)
@QUIET
def test_every_layer_is_placed_and_no_node_is_over_its_memory(
    model: str, numbers: dict[str, int], wished: Wishes
) -> None:
    pool = pool_of(numbers)
    spec = LIBRARY.model(model)
    demand = demand_of(spec, Question(context=1024, prompt=64))
    for placement in searched(model, pool, wished).placements.values():
        layers = [i for s in placement.stages for i in range(s.first_layer, s.end_layer)]
        assert layers == list(range(spec.num_hidden_layers))
        assert [s.embeds for s in placement.stages].count(True) == 1
        assert placement.stages[0].embeds
        assert [s.has_head for s in placement.stages].count(True) == 1
        assert placement.stages[-1].has_head

        used = dict.fromkeys(numbers, 0)
        for copies in placement.copies:
            slot = copies.slot
            held = math.ceil(placement.tokens_per_s * placement.latency.total / copies.active
                             - 1e-6)  # fmt: skip
            assert slot.weight_bytes + held * slot.sequence_bytes <= room_bytes(slot.node, demand)
            assert copies.spares >= wished.spares
            used[slot.node.name] += copies.num_nodes
        assert all(used[name] <= numbers[name] for name in used)


@given(st.sampled_from(["kimi-k2", "kimi-k3", "deepseek-v3"]), st.integers(0, 100_000),
       st.integers(1, 50_000))  # fmt: skip
@QUIET
def test_more_consoles_never_carry_less_of_a_large_model(model: str, some: int, more: int) -> None:
    def at(number: int) -> float:
        return rate(model, {"ps3": number}, Wishes()) if number else 0.0

    assert at(some + more) >= at(some) * (1 - 1e-9)


def test_all_experts_have_a_slot() -> None:
    for stage in plan("kimi-k3", "ps3:100000").placement.stages:
        if stage.expert_node is not None:
            assert stage.expert_slots * stage.experts_per_slot == pytest.approx(
                896 * stage.num_layers
            )


# Parts.


def test_a_kernel_takes_the_longer_of_streaming_and_computing() -> None:
    node = LIBRARY.node("rpi5")
    streaming = kernel_seconds(node, node.weight_bytes_per_s, 0)
    computing = kernel_seconds(node, 0, node.kernel_multiply_adds_per_s)
    both = kernel_seconds(node, 2 * node.weight_bytes_per_s, node.kernel_multiply_adds_per_s)

    assert (streaming.dma, streaming.compute) == (1.0, 0.0)
    assert (computing.dma, computing.compute) == (0.0, 1.0)
    assert (both.dma, both.compute, both.total) == (1.0, 1.0, 2.0)


def test_messages_meet_in_their_rack_as_far_as_it_goes() -> None:
    network = LIBRARY.network("datacenter")

    assert tier_shares(network, 40) == (1.0, 0.0, 0.0)
    in_rack, in_pod, beyond = tier_shares(network, 3000)
    assert in_rack == pytest.approx(39 / 2999)
    assert in_pod == pytest.approx((1999 - 39) / 2999)
    assert beyond == pytest.approx(1 - 1999 / 2999)
    assert mean_latency_s(network, 40) == network.tiers[0].latency_s


def test_a_lost_packet_costs_its_retransmission() -> None:
    servers = LIBRARY.server("measured")
    lossy = replace(LIBRARY.network("gigabit"), loss=0.01)
    sure = Link(LIBRARY.network("gigabit"), servers, 125e6, 2).message_s(1000)

    assert Link(lossy, servers, 125e6, 2).message_s(1000) - sure == pytest.approx(
        (1 - 0.99**2) * lossy.retransmit_s
    )


def test_a_sum_over_slices_counts_its_messages() -> None:
    link = Link(LIBRARY.network("gigabit"), LIBRARY.server("measured"), 125e6, 16)

    assert all_reduce(1, 1000, link) == (0.0, type(all_reduce(1, 1, link)[1])())
    assert all_reduce(4, 1000, link)[1].messages == 12
    assert all_reduce(16, 1000, link)[1].messages == 30


def test_the_fullest_slot_has_between_the_mean_and_all() -> None:
    assert busiest_load(8, 1) == 8
    assert busiest_load(8, 64) == pytest.approx(1.14, abs=0.05)
    assert busiest_load(6400, 64) == pytest.approx(100 + math.sqrt(200 * math.log(64)))


def test_availability_is_the_binomial_tail() -> None:
    assert at_most_down(3, 0, 0.1) == pytest.approx(0.9**3)
    assert at_most_down(3, 1, 0.1) == pytest.approx(0.9**3 + 3 * 0.1 * 0.9**2)
    assert at_most_down(3, 3, 0.1) == 1.0
    assert at_most_down(5, 0, 0.0) == 1.0
    assert mtbf_s(0.0) == math.inf
    assert down_share(LIBRARY.node("ps3")) == pytest.approx(0.024 / 1.024)


def test_spares_raise_availability_and_enough_of_them_reach_the_target() -> None:
    found = plan("llama-3.1-8b", "rpi5:40").failures

    shares = [each.full_rate for each in found.availability]
    assert shares == sorted(shares)
    assert found.spares_for_target is not None
    if found.spares_for_target < len(shares):
        assert shares[found.spares_for_target] >= 0.999


def test_concurrency_beyond_the_rate_waits_in_the_queue() -> None:
    few = plan("smollm2-135m", "rpi5:1", wishes=Wishes(concurrency=1)).times.next_token
    many = plan("smollm2-135m", "rpi5:1", wishes=Wishes(concurrency=5000)).times.next_token

    assert few.queue == pytest.approx(0.0, abs=1e-9)
    assert many.queue > few.total


def test_limits_are_sorted_and_the_first_one_is_told() -> None:
    found = plan("kimi-k2", "ps3:100000")

    full = [limit.full_at_nodes for limit in found.limits]
    assert full == sorted(full)
    told = [note for section in sections(found) for note in section.notes]
    assert any(f"first to break: {found.limits[0].what}" in note for note in told)
    assert found.load.broker_nodes > 1000  # 16 million messages a second


def test_switches_bring_their_uplinks_so_that_more_of_them_fill_none() -> None:
    found = plan("kimi-k2", "ps3:100000")

    (racks,) = [limit for limit in found.limits if "rack" in limit.what]
    assert racks.utilisation < 1
    assert racks.full_at_nodes == math.inf
    slow = replace(
        found.pool.network,
        tiers=tuple(replace(t, uplink_bytes_per_s=1e5) for t in found.pool.network.tiers),
    )
    full = limits(replace(found.pool, network=slow), found.placement, found.load)
    (racks,) = [limit for limit in full if "rack" in limit.what]
    assert racks.utilisation > 1
    assert racks.full_at_nodes == slow.rack_size


@pytest.mark.parametrize(
    ("model", "said"), [("kimi-k2", "hold no copy of the model"), ("smollm2-135m", "of its own")]
)
def test_more_servers_than_a_cluster_has_are_told_with_what_one_carries(
    model: str, said: str
) -> None:
    found = plan(model, "ps3:100000")
    most = found.pool.servers.broker_max_nodes

    told = [note for section in sections(found) for note in section.notes]

    assert found.load.broker_nodes > most
    assert any(f"more than a RabbitMQ cluster has ({most})" in n and said in n for n in told)
    few = [n for section in sections(plan("smollm2-135m", "a100:16")) for n in section.notes]
    assert not any("more than a Redis Cluster has" in note for note in few)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"wishes": Wishes(max_token_s=0.0)}, "--max-token-time"),
        ({"wishes": Wishes(max_token_s=math.nan)}, "--max-token-time"),
        ({"price_per_kwh": math.inf}, "--price"),
        ({"price_per_kwh": math.nan}, "--price"),
    ],
)
def test_a_question_without_a_meaning_is_refused(asked: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        answer("smollm2-135m", "rpi5:1", **asked)


# What is shown.


def test_json_is_json_and_says_the_same() -> None:
    found = plan("kimi-k2", "ps3:100000")
    shown = json.loads(json.dumps(plan_dict(found), allow_nan=False))

    assert shown["tokens_per_s"] == found.tokens_per_s
    assert shown["strategy"] == "expert"
    assert shown["strategies"]["expert"]["stages"][0]["embeds"] is True
    impossible = answer("kimi-k2", "ps3:10")
    assert isinstance(impossible, Impossible)
    shown = json.loads(json.dumps(impossible_dict(impossible), allow_nan=False))
    assert shown["would_fit_with"][0]["add_nodes"]["ps3"] > 3000


def test_the_headline_and_tables_name_what_was_asked() -> None:
    found = plan("kimi-k2", "ps3:100000")

    assert "Kimi-K2-Instruct at 4 bits on ps3:100000" in headline(found)
    for section in sections(found):
        assert all(len(row) == len(section.header) for row in section.rows), section.title


def test_the_report_is_one_file_with_four_plots(tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            check_html(tmp_path / "a.html")
        return
    found = plan("llama-3.1-8b", "rpi5:4")
    check_html(tmp_path / "a.html")

    text = to_html(found)

    assert text.count("<svg") == 4
    assert "src=" not in text
    assert [rate for _, rate in rate_curve(found)] == sorted(rate for _, rate in rate_curve(found))


def test_a_library_of_ones_own_leaves_the_bundled_one_alone() -> None:
    mine = builtin_library()
    mine.nodes.clear()

    assert isinstance(mine, Library)
    assert builtin_library().nodes


@pytest.mark.parametrize(
    ("model", "pool"), [("llama-3.3-70b", "ps3:2000"), ("kimi-k2", "ps3:100000")]
)
def test_racks_hold_no_more_than_they_have_and_every_copy_once(model: str, pool: str) -> None:
    found = plan(model, pool)
    placed = rack_copies(found.demand, found.placement, found.pool)

    full: dict[int, int] = {}
    for each in placed:
        for rack in each.racks:
            full[rack] = full.get(rack, 0) + 1
    assert max(full.values()) <= found.pool.network.rack_size
    assert max(full) < math.ceil(found.pool.num_nodes / found.pool.network.rack_size)
    assert sum(full.values()) == found.placement.num_nodes
    assert len({(each.stage, each.copy) for each in placed}) == len(placed)


def test_a_stage_that_fits_a_rack_is_not_cut_by_its_edge_and_copies_lie_apart() -> None:
    found = plan("llama-3.3-70b", "ps3:2000")

    spread = spread_of(rack_copies(found.demand, found.placement, found.pool))

    assert spread.together > 0.9
    assert spread.least_racks >= 2 or min(c.active for c in found.placement.copies) == 1
