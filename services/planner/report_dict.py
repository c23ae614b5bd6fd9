"""A plan as one JSON object. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from services.planner.missing import Impossible
from services.planner.placement import Placement
from services.planner.plan import Plan
from services.planner.question import Question
from services.planner.specs import Pool
from services.planner.timing import Seconds


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Numbers are bytes, seconds, watts; what is infinite is null."""
    shown: dict[str, Any] = _finite(
        {
            "plan": "possible",
            **_asked(plan.model.name, plan.pool, plan.question),
            "model_cost": asdict(plan.cost),
            "tokens_per_s": plan.tokens_per_s,
            "token_s": plan.placement.token_s,
            "sequences": plan.placement.streams,
            "replicas": plan.replicas,
            "strategy": str(plan.placement.strategy),
            "strategies": {
                str(strategy): _placement(found, plan.search.least_nodes[strategy])
                for strategy, found in plan.search.placements.items()
            },
            "does_not_fit": {str(s): why for s, why in plan.search.misfits.items()},
            "memory": [
                {
                    "slot": line.what,
                    "node": line.node.name,
                    "different": line.number,
                    "copies": line.copies,
                    "weight_bytes": line.weight_bytes,
                    "sequence_bytes": line.sequence_bytes,
                    "sequences": line.streams,
                    "worker_bytes": line.working_bytes + line.reserved_bytes,
                    "free_bytes": line.free_bytes,
                }
                for line in plan.memory
            ],
            "times": {
                "first_token": _seconds(plan.times.first_token),
                "next_token": _seconds(plan.times.next_token),
                "next_token_alone": _seconds(plan.times.alone),
            },
            "bill": asdict(plan.bill),
            "failures": asdict(plan.failures),
            "servers": asdict(plan.load),
            "unsure": {
                spec.name: dict(spec.unsure)
                for spec in (plan.model, *plan.pool.specs)
                if spec.unsure
            },
            "limits": [
                {**asdict(limit), "utilisation": limit.utilisation} for limit in plan.limits
            ],
        }
    )
    return shown


def impossible_dict(found: Impossible) -> dict[str, Any]:
    shown: dict[str, Any] = _finite(
        {
            "plan": "impossible",
            **_asked(found.model.name, found.pool, found.question),
            "model_cost": asdict(found.cost),
            "does_not_fit": found.reasons,
            "would_fit_with": [
                {"change": change.what, "add_nodes": dict(change.add_nodes)}
                for change in found.changes
            ],
        }
    )
    return shown


def _asked(model: str, pool: Pool, question: Question) -> dict[str, Any]:
    return {
        "model": model,
        "pool": {
            "name": pool.name,
            "nodes": {kind.node.name: kind.count for kind in pool.nodes},
            "network": pool.network.name,
            "servers": pool.servers.name,
        },
        "bits": question.bits,
        "context": question.context,
        "prompt": question.prompt,
        "wire": str(question.wire),
        "spares": question.wishes.spares,
        "concurrency": question.wishes.concurrency,
    }


def _placement(found: Placement, least_nodes: int) -> dict[str, Any]:
    return {
        "tokens_per_s": found.tokens_per_s,
        "token_s": found.latency.total,
        "messages_per_token": found.traffic.messages,
        "message_bytes_per_token": found.traffic.num_bytes,
        "batch": found.batch,
        "least_nodes": least_nodes,
        "bound_by": found.bound,
        "stages": [
            {
                "first_layer": stage.first_layer,
                "end_layer": stage.end_layer,
                "embeds": stage.embeds,
                "has_head": stage.has_head,
                "node": stage.node.name,
                "slices": stage.width,
                "slice_bytes": stage.weight_bytes,
                "expert_node": stage.expert_node.name if stage.expert_node else None,
                "expert_slots": stage.expert_slots,
                "experts_per_slot": stage.experts_per_slot,
            }
            for stage in found.stages
        ],
        "slots": [
            {
                "slot": each.slot.what,
                "node": each.slot.node.name,
                "different": each.slot.number,
                "copies": each.active,
                "spares": each.spares,
                "busy_s_per_token": each.slot.busy_s,
            }
            for each in found.copies
        ],
    }


def _seconds(seconds: Seconds) -> dict[str, float]:
    return {f"{name}_s": value for name, value in asdict(seconds).items()} | {
        "all_s": seconds.total
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
