"""A plan as tables of text, one list of rows for terminal and HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.planner.missing import Impossible
from services.planner.placement import Placement
from services.planner.plan import Plan
from services.planner.racks import rack_copies, spread_of
from services.planner.report_running import (
    bill_section,
    failures_section,
    limits_section,
    servers_section,
    times_section,
)
from services.planner.section import Section
from services.planner.slices import room_bytes
from services.planner.stages import Strategy
from services.planner.units import (
    human_bytes,
    human_count,
    human_seconds,
    scaled,
    share,
    three_digits,
)


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    placement = plan.placement
    return (
        f"{plan.model.title} at {plan.question.bits} bits on {plan.pool.name}: "
        f"{three_digits(plan.tokens_per_s)} tokens/s with {human_count(placement.streams)} "
        f"sequences at a time, each with a token every {human_seconds(placement.token_s)}; "
        f"bound by {placement.bound}"
    )


def sections(plan: Plan) -> list[Section]:
    """All that a plan says, in the order in which a builder asks."""
    return [
        _model(plan),
        _memory(plan),
        _strategies(plan),
        _groups(plan),
        times_section(plan),
        bill_section(plan),
        failures_section(plan),
        servers_section(plan),
        limits_section(plan),
        *_doubts(plan),
    ]


def _model(plan: Plan) -> Section:
    cost = plan.cost
    rows = [
        ("all weights", human_bytes(cost.total_bytes)),
        ("embedding", human_bytes(cost.embedding_bytes)),
        ("head", human_bytes(cost.head_bytes)),
        ("trunks of all layers", human_bytes(cost.trunk_bytes)),
        ("routed experts", human_bytes(cost.expert_bytes)),
        ("KV rows of a token", human_bytes(cost.kv_bytes_per_token)),
        ("recurrent state of a sequence", human_bytes(cost.state_bytes)),
        ("weights read for a token alone", human_bytes(cost.read_bytes_per_token)),
        ("multiply-adds of a token", scaled(cost.multiply_adds_per_token).rstrip()),
    ]
    return Section("The model", ("part", "size"), tuple(row for row in rows if row[1] != "0 B"))


def _memory(plan: Plan) -> Section:
    rows = [
        (
            line.what,
            line.node.name,
            f"{line.number:,}",
            human_bytes(line.weight_bytes),
            f"{line.streams} x {human_bytes(line.sequence_bytes)}" if line.sequence_bytes else "-",
            human_bytes(line.working_bytes + line.reserved_bytes),
            human_bytes(line.free_bytes),
        )
        for line in plan.memory
    ]
    notes = list(_splits(plan))
    resident = plan.resident_sequences
    if plan.placement.streams > resident + 1:
        notes.append(
            f"{human_count(resident)} sequences have room, the others wait until one of them ends"
        )
    return Section(
        "Memory of a node, by what it holds",
        ("slot", "node", "different", "weights", "sequences", "worker", "left"),
        tuple(rows),
        tuple(notes),
        frozenset({0, 1}),
    )


def _splits(plan: Plan) -> Iterator[str]:
    """Which parts are cut into slices, and whether they have to be."""
    alike: dict[tuple[str, int, int, str], list[int]] = {}
    for stage in plan.placement.stages:
        if stage.width == 1:
            continue
        whole = round(stage.weight_bytes / stage.share)
        what = "trunk" if stage.expert_node is not None else "layer"
        if stage.num_layers == 0:
            what = "embedding" if stage.embeds else "head"
        layers = alike.setdefault((what, whole, stage.width, stage.node.name), [])
        layers += range(stage.first_layer, stage.end_layer)
    rooms = {kind.node.name: room_bytes(kind.node, plan.demand) for kind in plan.pool.nodes}
    for (what, whole, width, node), layers in alike.items():
        room = rooms[node]
        if not layers or what == "trunk":
            named = f"the {what}" + (f" of {_named(layers)}" if layers else "")
        else:
            named = _named(layers)
        if whole > room:
            why = f"does not fit one {node}, which has {human_bytes(room)} for it"
        else:
            why = f"leaves a {node} too little for sequences, or is faster so"
        yield f"{named}, {human_bytes(whole)}, {why}: {width} slices"


def _named(layers: Sequence[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """1-3, 7 for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more runs" if len(texts) > 6 else "")


def _strategies(plan: Plan) -> Section:
    rows = []
    best = plan.placement
    for strategy in Strategy:
        found = plan.search.placements.get(strategy)
        if found is None:
            if strategy in plan.search.misfits:
                rows.append((str(strategy), "no", "", "", "", "", ""))
            continue
        rows.append(
            (
                f"{strategy}{' *' if found is best else ''}",
                f"{plan.search.least_nodes[strategy]:,}",
                f"{found.num_slots:,}",
                three_digits(found.traffic.messages),
                human_bytes(found.traffic.num_bytes),
                human_seconds(found.latency.total),
                three_digits(found.tokens_per_s),
            )
        )
    notes = [f"{strategy}: {text}" for strategy, text in plan.search.misfits.items()]
    return Section(
        "Pipeline, tensor or expert parallel",
        (
            "strategy", "least nodes", "slots", "messages a token", "bytes a token",
            "a token takes", "tokens/s",
        ),
        tuple(rows),
        (*notes, why_best(plan)),
    )  # fmt: skip


def why_best(plan: Plan) -> str:
    """Why the chosen strategy wins, in numbers."""
    best = plan.placement
    others = [p for p in plan.search.placements.values() if p is not best]
    if not others:
        return f"{best.strategy} is the only one that fits"
    reasons = [_against(best, other) for other in others]
    return f"{best.strategy} wins: " + "; ".join(reasons)


def _against(best: Placement, other: Placement) -> str:
    ours, theirs = best.latency, other.latency
    text = f"{three_digits(best.tokens_per_s / other.tokens_per_s)} times the tokens of "
    text += f"{other.strategy}, "
    if theirs.network > 1.5 * ours.network:
        text += (
            f"whose messages take {human_seconds(theirs.network)} of a token in place of "
            f"{human_seconds(ours.network)}"
        )
    elif theirs.dma + theirs.compute > 1.5 * (ours.dma + ours.compute):
        text += (
            f"whose kernels take {human_seconds(theirs.dma + theirs.compute)} of a token in place "
            f"of {human_seconds(ours.dma + ours.compute)}"
        )
    elif other.num_slots > 1.5 * best.num_slots:
        text += f"which takes {other.num_slots:,} nodes for one copy in place of {best.num_slots:,}"
    else:
        text += f"which is bound by {other.bound}"
    return text


def _groups(plan: Plan) -> Section:
    placement = plan.placement
    rows = [
        (
            each.slot.what,
            each.slot.node.name,
            f"{each.slot.number:,}",
            f"{each.active:,}",
            f"{each.spares:,}",
            f"{each.num_nodes:,}",
            share(min(1.0, placement.tokens_per_s * each.slot.busy_s / each.active)),
        )
        for each in placement.copies
    ]
    per_kind = []
    for kind in plan.pool.nodes:
        layers = sum(s.num_layers for s in placement.stages if s.node is kind.node)
        used = sum(c.num_nodes for c in placement.copies if c.slot.node is kind.node)
        per_kind.append(
            f"{kind.node.name}: {used:,} of {kind.count:,} nodes placed, trunks of {layers} layers"
        )
    if plan.pool.network.rack_size:
        racks = spread_of(rack_copies(plan.demand, placement, plan.pool))
        per_kind.append(
            f"racks of {plan.pool.network.rack_size}: copies stand one after the other, "
            f"{share(racks.together)} of them with all nodes of their stage in one rack; the "
            f"copies of a slot are in {racks.least_racks} or more racks"
        )
    per_kind.append(
        f"{len(placement.stages)} stages, {three_digits(plan.replicas)} copies of the weights"
    )
    return Section(
        "Placement",
        ("slot", "node", "different", "copies", "spares", "nodes", "busy"),
        tuple(rows),
        tuple(per_kind),
        frozenset({0, 1}),
    )


def _doubts(plan: Plan) -> list[Section]:
    """Which numbers of the data files are not sure; why is said there and in --json."""
    rows = [
        (spec.name, ", ".join(spec.unsure))
        for spec in (plan.model, *plan.pool.specs)
        if spec.unsure
    ]
    if not rows:
        return []
    header = ("spec", "numbers")
    return [Section("Assumed or not sure", header, tuple(rows), (), frozenset({0, 1}))]


def impossible_lines(found: Impossible) -> list[str]:
    """What is missing, and what would do."""
    lines = [
        f"{found.model.title} at {found.question.bits} bits, context {found.question.context:,}, "
        f"does not fit {found.pool.name}: {human_bytes(found.cost.total_bytes)} of weights"
    ]
    lines += [f"  {strategy}: {why}" for strategy, why in found.reasons.items()]
    if found.changes:
        lines.append("it would with " + ", or with ".join(c.what for c in found.changes))
    else:
        lines.append("no single change of nodes, bits, context or memory would do")
    return lines
