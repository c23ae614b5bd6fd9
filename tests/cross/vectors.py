"""Writes golden vectors for driver.c: inputs, and what the reference makes of them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from shared.kernel import reference
from shared.kernel.arrays import OPTIONAL_VECTORS
from shared.kernel.matrix import Float32, PackedMatrix
from shared.kernel.weights import GroupWeights, PagedSlice
from shared.model.backend import pick_backend
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup
from tests.kernel_values import random_activations, random_matrix
from tests.model.test_layer_group import ALL_OPTIONS
from tests.tiny_model import tiny_model

KINDS = {"int4": 1, "int8": 2}
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NUM_ROWS = (21, 5)
PAGES_EACH = 2


class Keeping:
    """The reference as a backend that remembers the weights it was given."""

    name = "reference"

    def bind(self, weights: GroupWeights) -> object:
        self.weights = weights
        return pick_backend("reference").bind(weights)


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def floats(array: Float32) -> bytes:
    return array.astype("<f4").tobytes()


def single(*values: float) -> bytes:
    return floats(np.array(values, np.float32))


def packed(m: PackedMatrix) -> bytes:
    head = ints(KINDS[m.kind], m.rows, m.cols, m.chunk_rows, m.data.nbytes)
    return head + m.data.tobytes()


def matmul_case(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    kind, terms = ("int4", "int8")[seed % 2], 1 + seed // 2 % 2
    rows, batch = int(rng.integers(1, 60)), int(rng.integers(1, 21))
    groups = int(rng.integers(1, 8))
    matrix = random_matrix(rng, kind, rows, groups)
    x = random_activations(rng, batch, groups)
    want = reference.matmul(matrix, reference.quantize_activations(x, terms))
    return ints(1) + packed(matrix) + ints(batch, terms) + floats(x) + floats(want)


def model_case(seed: int, **changes: object) -> bytes:
    tiny = tiny_model(seed, **changes)
    keeping = Keeping()
    config, end = tiny.config, tiny.config.num_hidden_layers
    group = LayerGroup.load(
        config,
        tiny.manifest,
        0,
        end,
        tiny.read_shard,
        first=True,
        last=True,
        backend=keeping,  # type: ignore[arg-type]
    )
    w, shape = keeping.weights, keeping.weights.shape
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, sum(NUM_ROWS))
    hidden = group.embed(ids.astype(np.int32))
    caches = [group.new_cache() for _ in NUM_ROWS]
    want = np.array(hidden)
    bound = pick_backend("reference").bind(w)
    bound.forward(want, [_slice(c, n) for c, n in zip(caches, NUM_ROWS, strict=True)])
    assert w.final_norm is not None
    assert w.head is not None
    parts = [
        ints(2, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads),
        ints(shape.head_dim, shape.half_pairing, shape.num_positions, len(w.layers)),
        ints(shape.gelu_tanh),
        single(shape.norm_eps, shape.score_scale, shape.score_softcap, shape.logit_softcap),
    ]
    for layer in w.layers:
        parts += [floats(layer.input_norm), floats(layer.post_norm)]
        parts += [packed(getattr(layer, name)) for name in MATRICES]
        parts.append(ints(layer.window))
        rope = layer.rope
        vectors = [getattr(layer, name) for name in OPTIONAL_VECTORS]
        vectors += [None, None] if rope is None else [rope.cos, rope.sin]
        for vector in vectors:
            parts += [ints(0)] if vector is None else [ints(vector.size), floats(vector)]
    parts += [floats(w.final_norm), packed(w.head), ints(*NUM_ROWS, PAGES_EACH)]
    head = bound.head(want)
    parts += [floats(hidden), floats(want), floats(head.values), ints(*head.largest)]
    parts += [page.astype("<u2").tobytes() for cache in caches for page in cache.pages]
    return b"".join(parts)


def _slice(cache: SequenceCache, num_rows: int) -> PagedSlice:
    cache.ensure_capacity(PAGES_EACH * 16)
    return PagedSlice(cache.pages, cache.page_addresses, 0, num_rows)


def write_vectors(path: Path) -> None:
    cases = [matmul_case(seed) for seed in range(12)]
    cases.append(model_case(1, num_hidden_layers=2))
    cases.append(model_case(2, num_hidden_layers=1, rope_pairing="half", num_key_value_heads=4))
    cases.append(model_case(3, num_hidden_layers=4, **ALL_OPTIONS))
    path.write_bytes(b"".join(cases) + ints(0))
