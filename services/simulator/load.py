"""What is asked of the cluster, and when. Knows no cluster.

Requests come by themselves (`Poisson`, `Bursty`, `Trace`), or each when one before has ended
(`Closed`), as from so many clients.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared.errors import ConfigError

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompt and answer in tokens: log-normal about a mean, as those of people are; `spread` 0 is
    always the mean. (BurstGPT, arXiv 2401.17644, finds such tails.)"""

    prompt: float = 128.0
    answer: float = 64.0
    spread: float = 0.5

    def draw(self, count: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Prompts and answers, each at least one token."""
        return _drawn(self.prompt, self.spread, count, rng), _drawn(
            self.answer, self.spread, count, rng
        )


def _drawn(mean: float, spread: float, count: int, rng: np.random.Generator) -> list[int]:
    if spread == 0.0:
        return [max(1, round(mean))] * count
    sigma = math.sqrt(math.log1p(spread**2))
    values = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    rounded: list[int] = np.clip(np.rint(values), 1, MAX_TOKENS).astype(int).tolist()
    return rounded


@dataclass(frozen=True, slots=True)
class Poisson:
    """`per_s` requests a second, independent of each other."""

    per_s: float

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        gaps = rng.standard_exponential(count) / self.per_s
        times: list[float] = np.cumsum(gaps).tolist()
        return times


@dataclass(frozen=True, slots=True)
class Bursty:
    """On average `per_s`, but `peak` times that for `burst_s` now and then, and less between: a
    Markov-modulated Poisson process of two states, each of exponential length."""

    per_s: float
    peak: float = 5.0
    burst_s: float = 30.0
    share: float = 0.1  # of the time

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        calm = self.per_s * max(0.0, 1.0 - self.peak * self.share) / (1.0 - self.share)
        times: list[float] = []
        at_s, in_burst = 0.0, False
        while len(times) < count:
            length_s = self.burst_s if in_burst else self.burst_s * (1.0 / self.share - 1.0)
            end_s = at_s + float(rng.standard_exponential()) * length_s
            rate = self.per_s * self.peak if in_burst else calm
            number = int(rng.poisson(rate * (end_s - at_s)))
            times += np.sort(rng.uniform(at_s, end_s, number)).tolist()
            at_s, in_burst = end_s, not in_burst
        return times[:count]


Arrivals = Poisson | Bursty


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it comes (for `Closed`: not before), and its sizes in tokens."""

    at_s: float
    num_prompt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """`asked` in order of time. With `concurrency` at most so many are under way at once, and each
    next one comes when one has ended; None lets them come when they do."""

    asked: tuple[Asked, ...]
    concurrency: int | None = None


def drawn_load(
    arrivals: Arrivals,
    sizes: Sizes,
    num_requests: int,
    *,
    arrivals_rng: np.random.Generator,
    sizes_rng: np.random.Generator,
) -> Load:
    """`num_requests` requests at drawn times, of drawn sizes."""
    prompts, answers = sizes.draw(num_requests, sizes_rng)
    times = arrivals.times(num_requests, arrivals_rng)
    return Load(tuple(map(Asked, times, prompts, answers)))


def fit_context(load: Load, context: int) -> Load:
    """The load as clients ask it who know that prompt and answer share `context` positions (2 or
    more): the longest are cut to it."""
    cut = []
    for asked in load.asked:
        if asked.num_prompt + asked.num_tokens > context:
            prompt = min(asked.num_prompt, context - 1)
            asked = replace(
                asked, num_prompt=prompt, num_tokens=min(asked.num_tokens, context - prompt)
            )
        cut.append(asked)
    return replace(load, asked=tuple(cut))


def read_trace(path: Path, *, context: int = 2 * MAX_TOKENS) -> Load:
    """A CSV file with a header: `at_s,prompt,answer` (seconds, tokens, tokens), in any order.

    Raises `ConfigError` naming the file, the line and the value that cannot be read, or that has
    no place in `context` positions.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            asked = sorted(_rows(path, csv.DictReader(file), context), key=lambda item: item.at_s)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    if not asked:
        raise ConfigError(f"--trace {path} holds no requests")
    return Load(tuple(asked))


def _rows(path: Path, reader: csv.DictReader[str], context: int) -> Iterator[Asked]:
    missing = {"at_s", "prompt", "answer"} - set(reader.fieldnames or ())
    if missing:
        raise ConfigError(f"--trace {path} has no column {sorted(missing)[0]!r} in its first line")
    for row in reader:
        place = f"--trace {path}, line {reader.line_num}"
        asked = Asked(
            _number(row["at_s"], f"{place}: at_s", low=0.0, high=1e9),
            _whole(row["prompt"], f"{place}: prompt"),
            _whole(row["answer"], f"{place}: answer"),
        )
        if (positions := asked.num_prompt + asked.num_tokens) > context:
            raise ConfigError(
                f"{place}: prompt and answer must be at most {context:,} tokens (--context), "
                f"got {positions:,}"
            )
        yield asked


def _whole(text: str | None, field: str) -> int:
    number = _number(text, field, low=1, high=MAX_TOKENS)
    if number != int(number):
        raise ConfigError(f"{field} must be a whole number, got {text!r}")
    return int(number)


def _number(text: str | None, field: str, *, low: float, high: float) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(f"{field} must be a number in {low:g}..{high:g}, got {text!r}")
    return number
