"""Turns what was measured on this machine into specs, and specs into predictions. Pure.

The measured cluster runs all its processes on the cores of one machine. Its loads of one stream say
what a step takes alone; those of many streams on one group what a worker takes for a step, and on
two what broker, store and clients take of the cores for a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.cost import head_multiply_adds, model_bytes, trunk_multiply_adds
from services.planner.placement import Wishes
from services.planner.plan import Plan, make_plan
from services.planner.question import Question
from services.planner.specs import ModelSpec, Pool
from shared.errors import ConfigError

MANY = 16
WORKERS_A_HOST = 8  # that share its memory
START, END = "<!-- calibration: begin -->", "<!-- calibration: end -->"


@dataclass(frozen=True, slots=True)
class Point:
    """A load on a cluster of so many groups: `streams` answers at once.

    Seconds a step at one hop are means over the groups; `batch` is steps a turn.
    """

    groups: int
    streams: int
    tokens_per_s: float
    first_token_s: float
    token_s: float
    compute_s: float
    broker_s: float
    worker_s: float
    commit_s: float
    batch: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that `cellpipe calibrate` measured. Rates are of one thread and one client."""

    cores: int
    memory_bytes: int
    read_bytes_per_s: float
    peak_multiply_adds_per_s: float
    broker_messages_per_s: float
    broker_bytes_per_s: float
    redis_operations_per_s: float
    redis_bytes_per_s: float
    redis_round_trip_s: float
    num_prompt: int
    num_tokens: int
    points: tuple[Point, ...]

    def point(self, groups: int, streams: int) -> Point:
        return next(p for p in self.points if (p.groups, p.streams) == (groups, streams))


def calibration_toml(measured: Measured, model: ModelSpec) -> str:
    """A file with hardware, network and servers `this`, for `Library.add_file`."""
    alone, many, two = (
        measured.point(1, 1), measured.point(1, MANY), measured.point(2, MANY)
    )  # fmt: skip
    bandwidth = model_bytes(model, 4) / alone.compute_s
    head = head_multiply_adds(model)
    layers = sum(trunk_multiply_adds(layer, model.hidden_size) for layer in model.layers)
    rate = many.batch * (head + layers) / many.compute_s
    # A turn of one worker that is never idle: its kernel, itself, and so much for each step.
    turn_of_many_s = many.token_s * many.batch / MANY
    step_s = max(0.0, turn_of_many_s - many.compute_s - alone.worker_s) / many.batch
    turn_s = max(0.0, alone.worker_s - step_s)
    busy_s = many.compute_s / many.batch + 2 * (turn_s / two.batch + step_s)
    hop_cpu_s = max(0.0, measured.cores * two.token_s / MANY - busy_s) / 2
    prompt_s = max(alone.compute_s, (measured.num_prompt * layers + head) / rate)
    # Of many prompts that wait for each other, half are done at the median: so long for each.
    each_s = 2 * (many.first_token_s - alone.first_token_s) / (MANY - 1)
    each_of_two_s = 2 * (two.first_token_s - alone.first_token_s) / (MANY - 1)
    speedup = max(1.0, prompt_s / max(1e-9, each_s - turn_s - step_s))
    prompt_s /= speedup
    request_cpu_s = max(0.0, measured.cores * each_of_two_s - prompt_s - 2 * (turn_s + step_s))
    first_s = prompt_s + turn_s + step_s + alone.broker_s + alone.commit_s
    admission_s = max(0.0, alone.first_token_s - first_s)
    hardware = {
        "title": f"a worker with one thread on this machine of {measured.cores} cores",
        "memory_bytes": measured.memory_bytes // WORKERS_A_HOST,
        "reserved_bytes": 90_000_000,
        "memory_bytes_per_s": max(measured.read_bytes_per_s, bandwidth),
        "multiply_adds_per_s": max(measured.peak_multiply_adds_per_s, rate),
        "bandwidth_share": min(1.0, bandwidth / measured.read_bytes_per_s),
        "compute_share": min(1.0, rate / measured.peak_multiply_adds_per_s),
        "network_bytes_per_s": 2e9,
        "watts": 0.0,
        "failures_per_hour": 2e-5,
        "repair_hours": 24.0,
        "turn_s": turn_s,
        "step_s": step_s,
        "host_cores": measured.cores,
        "hop_cpu_s": hop_cpu_s,
        "request_cpu_s": request_cpu_s,
        "prompt_speedup": speedup,
    }
    servers = {
        "title": "private servers on this machine",
        "broker_messages_per_s": measured.broker_messages_per_s,
        "broker_bytes_per_s": measured.broker_bytes_per_s,
        "broker_hop_s": alone.broker_s,
        "redis_operations_per_s": measured.redis_operations_per_s,
        "redis_bytes_per_s": measured.redis_bytes_per_s,
        "redis_round_trip_s": measured.redis_round_trip_s,
        "commit_s": alone.commit_s,
        "admission_s": admission_s,
        "redis_memory_bytes": measured.memory_bytes,
    }
    network = {"title": "the loopback of this machine", "loss": 0.0, "retransmit_s": 0.2}
    tier = '{ name = "loopback", size = 0, latency_s = 0.0, uplink_bytes_per_s = 2e9 }'
    return "\n".join(
        [
            "# Written by `cellpipe calibrate`. `cellpipe plan --pool this:6` reads it.",
            *_table("hardware.this", hardware),
            "[hardware.this.sources]",
            '"*" = "measured here by `cellpipe calibrate`"',
            "[hardware.this.unsure]",
            'watts = "not measured"',
            'failures_per_hour = "not measured"',
            "",
            *_table("network.this", network),
            f"tiers = [{tier}]",
            "[network.this.sources]",
            '"*" = "what messages take on loopback is in servers.this.broker_hop_s"',
            "",
            *_table("servers.this", servers),
            "[servers.this.sources]",
            '"*" = "measured here by `cellpipe calibrate`, one client"',
            "",
        ]
    )


def _table(name: str, values: dict[str, object]) -> list[str]:
    lines = [f"[{name}]"]
    for key, value in values.items():
        if isinstance(value, str):
            lines.append(f'{key} = "{value}"')
        elif isinstance(value, float):
            lines.append(f"{key} = {value!r}")
        else:
            lines.append(f"{key} = {value}")
    return lines


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one load: tokens a second as a benchmark counts them, and seconds to the first token."""

    groups: int
    streams: int
    tokens_per_s: float
    first_token_s: float


def predict(
    model: ModelSpec, pool: Pool, groups: int, streams: int, *, num_prompt: int, num_tokens: int
) -> Prediction:
    """What `bench cluster` should find: all streams start together, and count until the last token.

    Raises `ConfigError` if there is no such plan.
    """
    wishes = Wishes(concurrency=streams, groups=groups)
    context = num_prompt + num_tokens
    found = make_plan(model, pool, Question(context=context, prompt=num_prompt, wishes=wishes))
    if not isinstance(found, Plan):
        raise ConfigError(f"{model.name} in {groups} groups does not fit {pool.name}")
    first = found.times.first_token
    alone_s = first.total - first.queue
    prompts_s = (streams - 1) * _prompt_s(found)
    first_s = alone_s + prompts_s / 2
    whole_s = alone_s + prompts_s + (num_tokens - 1) * found.placement.token_s
    return Prediction(groups, streams, streams * num_tokens / whole_s, first_s)


def _prompt_s(plan: Plan) -> float:
    """Seconds between the ends of two prompts of many: a group's work on one, or that of all groups
    and of the request itself on the cores that they share."""
    first = plan.times.first_token
    work_s = first.dma + first.compute + first.worker
    host = plan.placement.stages[0].node
    slowest_s = work_s / len(plan.placement.stages)
    if not host.host_cores:
        return slowest_s
    return max(slowest_s, (work_s + host.request_cpu_s) / host.host_cores)


def comparison(measured: Sequence[Point], predicted: Sequence[Prediction]) -> list[str]:
    """Lines of a Markdown table, and how far the predictions are off, in the median."""
    lines = [
        "| groups | streams | tok/s measured | predicted | off "
        "| first token measured | predicted | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rates, firsts = [], []
    for point, said in zip(measured, predicted, strict=True):
        rate = said.tokens_per_s / point.tokens_per_s - 1
        first = said.first_token_s / point.first_token_s - 1
        rates.append(abs(rate))
        firsts.append(abs(first))
        lines.append(
            f"| {point.groups} | {point.streams} | {point.tokens_per_s:.0f} "
            f"| {said.tokens_per_s:.0f} | {rate:+.0%} | {1e3 * point.first_token_s:.0f} ms "
            f"| {1e3 * said.first_token_s:.0f} ms | {first:+.0%} |"
        )
    lines += [
        "",
        f"Off in the median: {_median(rates):.0%} in tok/s, {_median(firsts):.0%} in the time to "
        "the first token.",
    ]
    return lines


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def between_marks(text: str, lines: Sequence[str], file: str) -> str:
    """A document with the lines in place of what was between its two marks.

    Raises `ConfigError` naming the file when it has no such marks.
    """
    if START not in text or END not in text or text.index(START) > text.index(END):
        raise ConfigError(f"{file} has no place for the table: {START} and {END}")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    return "\n".join([before + START, *lines, END + after])
