"""Draws the questions of a run from a seed. Pure."""

from __future__ import annotations

import random

from shared.local_cluster.load import Question
from shared.messages import SamplingParams

MAX_QUESTIONS = 24  # distinct ones: each costs an undisturbed run before the load
MIN_TOKENS, MAX_TOKENS = 32, 64


def draw_questions(
    num_requests: int | None, seed: int, *, vocab_size: int, max_positions: int
) -> list[Question]:
    """Prompts of random tokens, greedy and sampled in turn, each long enough to be hit mid-way.

    As many questions as requests, or `MAX_QUESTIONS` if those are more or without number (None).
    End-of-sequence is ignored, so that every answer has the length it was asked for. One in five
    has penalties, so that its tokens depend on all those before.
    """
    rng = random.Random(f"questions/{seed}")
    longest = max(1, max_positions - MAX_TOKENS)
    questions = []
    for number in range(min(num_requests or MAX_QUESTIONS, MAX_QUESTIONS)):
        # One in eight is longer than a prefill slice.
        length = min(longest, rng.randint(140, 200) if number % 8 == 7 else rng.randint(8, 40))
        greedy = number % 2 == 0
        # One in three repeats itself, so that drafts are sent, and taken.
        period = rng.randint(3, 8) if number % 3 == 2 else length
        passage = [rng.randrange(vocab_size) for _ in range(period)]
        questions.append(
            Question(
                tuple(passage[place % period] for place in range(length)),
                SamplingParams(
                    temperature=0.0 if greedy else rng.uniform(0.5, 1.2),
                    top_k=0 if greedy else rng.choice((0, 40)),
                    top_p=1.0 if greedy else rng.choice((1.0, 0.9)),
                    seed=rng.randrange(1 << 32),
                    max_tokens=rng.randint(MIN_TOKENS, MAX_TOKENS),
                    ignore_eos=True,
                    frequency_penalty=0.3 if number % 5 == 4 else 0.0,
                    repetition_penalty=1.1 if number % 5 == 4 else 1.0,
                ),
            )
        )
    return questions
