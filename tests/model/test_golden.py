"""Golden vectors: a tiny model from a fixed seed, its logits and 32 greedy tokens.

A change of these bits breaks every mixed cluster. Rewrite the file only when docs/arithmetic.md
changes: python -m tests.model.test_golden
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from shared.kernel.weights import KernelBackend
from shared.model.backend import pick_backend
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.model.sampling import sample
from tests.kernel_backends import backend_or_skip, every_backend
from tests.tiny_model import TinyModel, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_model.json"
PROMPT = (1, 17, 42, 99, 200)
NUM_TOKENS = 32


def golden_model() -> TinyModel:
    return tiny_model(20261130)


def run(model: TinyModel, backend: KernelBackend, temperature: float) -> dict[str, Any]:
    """Tokens drawn one after the other, and the SHA-256 of all logits as little-endian float32."""
    num_layers = model.config.num_hidden_layers
    group = LayerGroup.load(
        model.config,
        model.manifest,
        0,
        num_layers,
        model.read_shard,
        first=True,
        last=True,
        backend=backend,
    )
    cache = group.new_cache()
    digest = hashlib.sha256()
    tokens = list(PROMPT)
    new = np.array(PROMPT, np.int32)
    for _ in range(NUM_TOKENS):
        position = cache.num_positions
        hidden = group.forward(group.embed(new), [SequenceSlice(cache, position, len(new))])
        logits = group.logits(hidden[-1:])[0]
        digest.update(logits.astype("<f4").tobytes())
        token = sample(
            logits,
            temperature=temperature,
            top_k=40,
            top_p=0.95,
            seed=1234,
            position=len(tokens),
        )
        tokens.append(token)
        new = np.array([token], np.int32)
    return {"tokens": tokens[len(PROMPT) :], "logits_sha256": digest.hexdigest()}


def test_the_golden_model_is_the_same_model() -> None:
    want = json.loads(GOLDEN.read_text())

    assert golden_model().manifest.model_id == want["model_id"]


@every_backend
def test_golden_greedy_tokens_and_logits(backend_name: str) -> None:
    want = json.loads(GOLDEN.read_text())

    assert run(golden_model(), backend_or_skip(backend_name), 0.0) == want["greedy"]


@every_backend
def test_golden_sampled_tokens_and_logits(backend_name: str) -> None:
    want = json.loads(GOLDEN.read_text())

    assert run(golden_model(), backend_or_skip(backend_name), 0.8) == want["sampled"]


if __name__ == "__main__":
    reference = pick_backend("reference")
    content = {
        "model_id": golden_model().manifest.model_id,
        "prompt": PROMPT,
        "greedy": run(golden_model(), reference, 0.0),
        "sampled": run(golden_model(), reference, 0.8),
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
