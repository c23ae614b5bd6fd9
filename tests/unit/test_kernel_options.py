"""Facts about what a layer may do beside a llama's: on every path it is what the reference does,
bit for bit, and the functions that it needs are close to the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernel import reference
from shared.kernel.reference_attention import attention, store_kv
from shared.model.layer_group import LayerGroup, SequenceSlice
from tests.kernel_backends import backend_or_skip, every_path, native_or_skip
from tests.kernel_values import F, same_bits
from tests.tiny_model import tiny_model

EDGES = F([0, -0.0, 0.5, -0.5, np.nextafter(F(0.5), F(0)), 1e-45, -1e-42, 3e38, -3e38, 43.5, 44.5])


def many_values(spread: float) -> np.ndarray:
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 2**32, 100_000).astype(np.uint32).view(F)
    anything = anything[np.isfinite(anything)]
    x = np.concatenate([EDGES, rng.normal(0, spread, 100_000).astype(F), anything])
    return x[: len(x) // 32 * 32]


@every_path
def test_gelu_equals_the_reference_and_is_close_to_the_truth(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    x = many_values(3.0)
    up = np.random.default_rng(4).normal(0, 1, x.shape).astype(F)

    got = native.gelu_mul(backend, x, up)

    with np.errstate(over="ignore"):
        assert same_bits(got, reference.gelu_tanh(x) * up)
    near = x[np.abs(x) < 5].astype(np.float64)
    truth = 0.5 * near * (1 + np.tanh(np.sqrt(2 / np.pi) * (near + 0.044715 * near**3)))
    assert np.abs(reference.gelu_tanh(near.astype(F)) - truth).max() < 1e-6


@pytest.mark.parametrize("cap", [30.0, 50.0, 0.3])
def test_a_soft_cap_equals_the_reference_and_is_close_to_the_truth(cap: float) -> None:
    native_or_skip()
    from shared.kernel import native

    x = many_values(2 * cap)

    got = native.softcap(x, cap)

    assert same_bits(got, reference.softcap(x, cap))
    normal = np.abs(x) > 1e-30
    truth = cap * np.tanh(x[normal].astype(np.float64) / cap)
    assert np.abs(got[normal] / truth - 1).max() < 5e-7
    assert np.abs(got).max() <= F(cap)


def load(model: object, path: str, threads: int = 1) -> LayerGroup:
    return LayerGroup.load(
        model.config, model.manifest, 0, 2, model.read_shard,  # type: ignore[attr-defined]
        first=True, last=True, backend=backend_or_skip(path, threads),
    )  # fmt: skip


def run(group: LayerGroup, sizes: list[int], steps: int) -> bytes:
    """Prompts of unequal lengths in one batch, then steps of one token each: all hidden states and
    KV rows."""
    caches = [group.new_cache() for _ in sizes]
    out = b""
    for step in range(1 + steps):
        counts = sizes if step == 0 else [1] * len(sizes)
        slices = [
            SequenceSlice(cache, cache.num_positions, count)
            for cache, count in zip(caches, counts, strict=True)
        ]
        ids = (np.arange(sum(counts)) * 37 + step).astype(np.int32) % 250
        hidden = group.forward(group.embed(ids), slices)
        out += hidden.tobytes() + group.logits(hidden).tobytes()
    return out + b"".join(cache.export_rows(0, cache.num_positions) for cache in caches)


@every_path
@given(
    window=st.integers(1, 70),
    sliding=st.sets(st.integers(0, 1)),
    rope_free=st.sets(st.integers(0, 1)),
    softcap=st.sampled_from([None, 0.5, 50.0]),
    flags=st.tuples(*[st.booleans()] * 5),
    heads=st.sampled_from([(4, 2, 16), (2, 2, 32), (6, 1, 32), (4, 1, 96)]),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    threads=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_any_options_give_the_references_bits(
    path: str,
    window: int,
    sliding: set[int],
    rope_free: set[int],
    softcap: float | None,
    flags: tuple[bool, ...],
    heads: tuple[int, int, int],
    sizes: list[int],
    threads: int,
) -> None:
    bias, qk_norm, post_norms, gelu, half = flags
    model = tiny_model(
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        sliding_window=window,
        sliding_layers=tuple(sorted(sliding)),
        rope_free_layers=tuple(sorted(rope_free)),
        attention_softcap=softcap,
        logit_softcap=softcap,
        qkv_bias=bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        activation="gelu_tanh" if gelu else "silu",
        rope_pairing="half" if half else "interleaved",
    )

    got = run(load(model, path, threads), sizes, steps=2)

    assert got == run(load(model, "reference"), sizes, steps=2)


@given(
    window=st.integers(1, 70),
    start=st.integers(0, 90),
    num_rows=st.integers(1, 40),
    cap=st.sampled_from([0.0, 3.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_reference_attends_to_the_window_and_to_nothing_else(
    window: int, start: int, num_rows: int, cap: float
) -> None:
    rng = np.random.default_rng(window)
    end = start + num_rows
    pages = [np.full((1, 1, 2, 16, 8), 0x7BFF, np.uint16) for _ in range(-(-end // 16))]
    k, v = rng.normal(0, 1, (2, end, 1, 8)).astype(np.float16).astype(F)
    store_kv(pages, 0, 0, k, v)
    q = rng.normal(0, 1, (num_rows, 2, 8)).astype(F)

    got = attention(q, pages, 0, start, 0.5, window=window, score_softcap=cap)

    for row in range(num_rows):
        seen = slice(max(0, start + row - window + 1), start + row + 1)
        scores = np.einsum("hd,sd->hs", q[row], k[seen, 0]).astype(np.float64) * 0.5
        scores = cap * np.tanh(scores / cap) if cap else scores
        p = np.exp(scores)
        truth = (p / p.sum(axis=1, keepdims=True)) @ v[seen, 0]
        np.testing.assert_allclose(got[row], truth, rtol=1e-4, atol=1e-5)
