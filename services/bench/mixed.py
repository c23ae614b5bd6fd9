"""Measures long prompts and decoding streams that share a cluster, beside each of them alone.

In one round prompts are asked one at a time of an idle cluster; then streams decode, and the same
number of prompts comes one at a time, with a pause before each. So all four figures are of the same
seconds, on a machine whose speed changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from services.bench.options import ClusterOptions
from services.bench.rig import LOOK_S, Rig, private_servers
from shared.errors import RequestError
from shared.local_cluster.load import Load, Sighting
from shared.percentiles import percentile

STREAM_PROMPT = 16
WARM_TOKENS = 8  # of each stream before anything counts
PAUSE_S = 1.0  # in which the streams are alone, before each prompt
# Of one stream, and of all: they are ended early, but room is kept for the whole, and prompts must
# not wait for it. Two workers of 256 MiB hold 8,300 positions of SmolLM2-135M.
MAX_STREAM_TOKENS, MAX_TOKENS = 900, 7_200

Window = tuple[float, float]  # from when a prompt was submitted to its first token


@dataclass(frozen=True, slots=True)
class MixedRound:
    """Milliseconds of one round: to a prompt's first token, and between two tokens of a stream."""

    first_idle_ms: float
    first_mixed_ms: float
    next_p50_alone_ms: float
    next_p50_mixed_ms: float
    next_p95_alone_ms: float
    next_p95_mixed_ms: float


@dataclass(frozen=True, slots=True)
class MixedFigures:
    """Medians of the rounds; the ratios are medians of the rounds' ratios, mixed to alone."""

    model_id: str
    options: ClusterOptions
    num_streams: int
    num_prompts: int
    median: MixedRound
    first_ratio: float
    next_p95_ratio: float
    rounds: list[MixedRound]


def measure_mixed(
    options: ClusterOptions, *, num_prompts: int, say: Callable[[str], None]
) -> MixedFigures:
    """Run it all with the first of the numbers of groups and of streams; `say` hears of each step.

    Raises `ConfigError` when it cannot start, `RequestError` when an answer is not whole.
    """
    num_groups, num_streams = options.num_groups[0], options.concurrency[0]
    num_positions = options.num_prompt + 1
    with (
        private_servers(options, say) as (servers, logs),
        Rig(options, num_groups, servers, logs, say, num_positions=num_positions) as rig,
    ):
        say("warming up")
        _round(rig, options.num_prompt, num_streams, 1)
        rounds = []
        for number in range(options.rounds):
            figures = _round(rig, options.num_prompt, num_streams, num_prompts)
            say(
                f"round {number + 1}/{options.rounds}: first token after "
                f"{figures.first_idle_ms:.0f} ms, {figures.first_mixed_ms:.0f} beside streams; "
                f"next token p95 {figures.next_p95_alone_ms:.0f} ms, "
                f"{figures.next_p95_mixed_ms:.0f} beside a prompt"
            )
            rounds.append(figures)
        return summary_of(rig.layout.model_id, options, num_streams, num_prompts, rounds)


def summary_of(
    model_id: str,
    options: ClusterOptions,
    num_streams: int,
    num_prompts: int,
    rounds: Sequence[MixedRound],
) -> MixedFigures:
    columns = zip(*(asdict(figures).values() for figures in rounds), strict=True)
    return MixedFigures(
        model_id,
        options,
        num_streams,
        num_prompts,
        MixedRound(*map(statistics.median, columns)),
        statistics.median(r.first_mixed_ms / r.first_idle_ms for r in rounds),
        statistics.median(r.next_p95_mixed_ms / r.next_p95_alone_ms for r in rounds),
        list(rounds),
    )


def gaps_s(
    streams: Sequence[Sequence[float]], windows: Sequence[Window]
) -> tuple[list[float], list[float]]:
    """Seconds between two tokens of a stream: those outside all windows, and those that touch one.

    `streams` are the times of each one's tokens. What comes after the last window counts for
    neither: the streams are being ended.
    """
    alone: list[float] = []
    mixed: list[float] = []
    for arrivals in streams:
        for before, after in pairwise(arrivals):
            if any(before < end and after > begin for begin, end in windows):
                mixed.append(after - before)
            elif before < windows[-1][0]:
                alone.append(after - before)
    return alone, mixed


def _round(rig: Rig, num_tokens: int, num_streams: int, num_prompts: int) -> MixedRound:
    idle = [_first_token(rig, num_tokens) for _ in range(num_prompts)]
    room = rig.config.max_position_embeddings - STREAM_PROMPT
    num_stream_tokens = min(MAX_STREAM_TOKENS, MAX_TOKENS // num_streams, room)
    load = rig.ask(rig.prompts(num_streams, STREAM_PROMPT), num_stream_tokens)
    try:
        _wait_for_tokens(rig, load, num_streams)
        mixed = []
        for _ in range(num_prompts):
            time.sleep(PAUSE_S)
            mixed.append(_first_token(rig, num_tokens))
        if any(seen.finish_reason is not None for seen in load.sightings):
            raise RequestError("a stream ended before the last prompt was answered")
    finally:
        for seen in load.sightings:
            if seen.tokens:
                rig.producer.cancel(seen.request_id)
        _wait_for_end(rig, load)
    streams = [[at_s for at_s, _, _ in seen.tokens][WARM_TOKENS:] for seen in load.sightings]
    alone_s, mixed_s = gaps_s(streams, mixed)
    return MixedRound(
        _median_ms(end - begin for begin, end in idle),
        _median_ms(end - begin for begin, end in mixed),
        _percentile_ms(alone_s, 0.5),
        _percentile_ms(mixed_s, 0.5),
        _percentile_ms(alone_s, 0.95),
        _percentile_ms(mixed_s, 0.95),
    )


def _first_token(rig: Rig, num_tokens: int) -> Window:
    (stream,) = rig.answer(rig.prompts(1, num_tokens), 1)
    return stream.submitted_s, stream.arrivals_s[0]


def _wait_for_tokens(rig: Rig, load: Load, num_streams: int) -> None:
    def is_warm(seen: Sighting) -> bool:
        return len(seen.tokens) > WARM_TOKENS

    while len(load.sightings) < num_streams or not all(map(is_warm, load.sightings)):
        rig.check()
        if not load.is_running():
            raise RequestError("the streams ended before they were measured")
        time.sleep(LOOK_S)


def _wait_for_end(rig: Rig, load: Load) -> None:
    while load.is_running():
        rig.check()
        time.sleep(LOOK_S)
    load.stop()


def _median_ms(values_s: Iterable[float]) -> float:
    return 1e3 * statistics.median(values_s)


def _percentile_ms(values_s: Sequence[float], share: float) -> float:
    value = percentile(values_s, share)
    if value is None:
        raise RequestError("no two tokens of a stream came where they were to be measured")
    return 1e3 * value


def mixed_dict(figures: MixedFigures) -> dict[str, Any]:
    shown = asdict(figures)
    log_folder = figures.options.log_folder
    shown["options"]["log_folder"] = str(log_folder) if log_folder else None
    return {"bench": "cluster mixed", **shown}


def mixed_lines(figures: MixedFigures) -> list[str]:
    options, median = figures.options, figures.median
    return [
        f"{figures.model_id}: prompts of {options.num_prompt} tokens, one at a time, beside "
        f"{figures.num_streams} streams; {options.num_groups[0]} group(s), "
        f"{options.workers_per_group} x {options.threads} thread(s) a group, medians of "
        f"{options.rounds} rounds of {figures.num_prompts} prompts",
        f"{'':>22} {'alone':>8} {'mixed':>8} {'ratio':>6}",
        f"{'first token, ms':>22} {median.first_idle_ms:>8.1f} {median.first_mixed_ms:>8.1f} "
        f"{figures.first_ratio:>6.2f}",
        f"{'next token p50, ms':>22} {median.next_p50_alone_ms:>8.1f} "
        f"{median.next_p50_mixed_ms:>8.1f}",
        f"{'next token p95, ms':>22} {median.next_p95_alone_ms:>8.1f} "
        f"{median.next_p95_mixed_ms:>8.1f} {figures.next_p95_ratio:>6.2f}",
    ]
