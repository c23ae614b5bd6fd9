"""The C kernel is never handed an array of another type, shape or layout than it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.errors import KernelError
from shared.kernel.arrays import OPTIONAL_VECTORS
from shared.kernel.matrix import PackedMatrix
from shared.kernel.weights import BoundGroup, GroupWeights, PagedSlice
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup
from tests.kernel_backends import native_or_skip
from tests.kernel_values import random_matrix
from tests.tiny_model import TinyModel, tiny_model

ROWS = 20  # two KV pages


class Recorder:
    """A backend that keeps the weights it is handed."""

    name = "recorder"
    weights: GroupWeights

    def bind(self, weights: GroupWeights) -> BoundGroup:
        self.weights = weights
        return native_or_skip().bind(weights)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model(qkv_bias=True, qk_norm=True, post_norms=True)


@pytest.fixture(scope="module")
def weights(model: TinyModel) -> GroupWeights:
    recorder = Recorder()
    num_layers = model.config.num_hidden_layers
    LayerGroup.load(
        model.config, model.manifest, 0, num_layers, model.read_shard,
        first=True, last=True, backend=recorder,
    )  # fmt: skip
    return recorder.weights


@pytest.fixture
def group(weights: GroupWeights) -> BoundGroup:
    return native_or_skip().bind(weights)


def new_slice(weights: GroupWeights, num_rows: int = ROWS) -> PagedSlice:
    shape = weights.shape
    cache = SequenceCache(len(weights.layers), shape.num_kv_heads, shape.head_dim)
    cache.ensure_capacity(num_rows)
    return PagedSlice(cache.pages, cache.page_addresses, 0, num_rows)


def strided(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


WRONG_HIDDEN: dict[str, Callable[[np.ndarray], Any]] = {
    "float64": lambda a: a.astype(np.float64),
    "int32": lambda a: a.astype(np.int32),
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "strided": strided,
    "transposed": np.asfortranarray,
    "reversed": lambda a: a[::-1],
    "too few columns": lambda a: np.ascontiguousarray(a[:, :-1]),
    "too many columns": lambda a: np.concatenate([a, a], axis=1),
    "flat": lambda a: a.reshape(-1),
    "a list": lambda a: a.tolist(),
}


@pytest.mark.parametrize("how", [*WRONG_HIDDEN, "read-only", "too few rows"])
def test_forward_refuses_hidden_states_that_it_would_misread(
    group: BoundGroup, weights: GroupWeights, how: str
) -> None:
    hidden = np.ones((ROWS, weights.shape.hidden_size), np.float32)
    change = WRONG_HIDDEN | {"read-only": read_only, "too few rows": lambda a: a[:-1]}

    with pytest.raises(KernelError):
        group.forward(change[how](hidden), [new_slice(weights)])

    group.forward(hidden, [new_slice(weights)])  # it goes on


WRONG_SLICES: dict[str, Callable[[PagedSlice], PagedSlice]] = {
    "addresses of int32": lambda s: replace(s, addresses=s.addresses.astype(np.int32)),
    "addresses strided": lambda s: replace(s, addresses=strided(s.addresses)),
    "addresses too few": lambda s: replace(s, addresses=s.addresses[:-1]),
    "addresses elsewhere": lambda s: replace(s, addresses=s.addresses + np.uintp(64)),
    "a page of float16": lambda s: replace(s, pages=[p.view(np.float16) for p in s.pages]),
    "a page too small": lambda s: replace(s, pages=[p[:, :, :, :8] for p in s.pages]),
    "a page of other layers": lambda s: replace(s, pages=[p[:1] for p in s.pages]),
    "no page": lambda s: replace(s, pages=[], addresses=s.addresses[:0]),
    "behind the pages": lambda s: replace(s, start_position=13),
    "before the pages": lambda s: replace(s, start_position=-1),
    "no rows": lambda s: replace(s, num_rows=0),
    "too many rows for C": lambda s: replace(s, num_rows=2**40),
}


@pytest.mark.parametrize("how", WRONG_SLICES)
def test_forward_refuses_pages_that_it_would_misread(
    group: BoundGroup, weights: GroupWeights, how: str
) -> None:
    hidden = np.ones((ROWS, weights.shape.hidden_size), np.float32)

    with pytest.raises(KernelError):
        group.forward(hidden, [WRONG_SLICES[how](new_slice(weights))])


@pytest.mark.parametrize("how", WRONG_HIDDEN)
def test_logits_refuse_rows_that_they_would_misread(
    group: BoundGroup, weights: GroupWeights, how: str
) -> None:
    rows = np.ones((ROWS, weights.shape.hidden_size), np.float32)

    with pytest.raises(KernelError):
        group.head(WRONG_HIDDEN[how](rows))


@pytest.mark.parametrize(
    "token_ids",
    [
        np.array([1, 2], np.int64),
        np.array([1.0, 2.0], np.float32),
        np.array([[1, 2]], np.int32),
        np.arange(8, dtype=np.int32)[::2],
        [1, 2],
    ],
)
def test_embed_refuses_token_ids_that_it_would_misread(group: BoundGroup, token_ids: Any) -> None:
    with pytest.raises(KernelError, match="token ids must be"):
        group.embed(token_ids)


def with_changed(
    weights: GroupWeights, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> GroupWeights:
    """The weights with one array changed: of layer 1, its rope tables, or of the group."""
    if name == "final_norm":
        assert weights.final_norm is not None
        return replace(weights, final_norm=change(weights.final_norm))
    layer = weights.layers[1]
    if name.startswith("rope_"):
        assert layer.rope is not None
        table = name.removeprefix("rope_")
        rope = replace(layer.rope, **{table: change(getattr(layer.rope, table))})
        layer = replace(layer, rope=rope)
    else:
        layer = replace(layer, **{name: change(getattr(layer, name))})
    return replace(weights, layers=(weights.layers[0], layer, *weights.layers[2:]))


@pytest.mark.parametrize("name", ["rope_cos", "rope_sin", "final_norm", *OPTIONAL_VECTORS])
@pytest.mark.parametrize("how", ["float64", "strided", "short"])
def test_weights_that_would_be_misread_are_refused(
    weights: GroupWeights, name: str, how: str
) -> None:
    change = WRONG_HIDDEN | {"short": lambda a: np.ascontiguousarray(a[..., :-1])}

    with pytest.raises(KernelError, match=name):
        native_or_skip().bind(with_changed(weights, name, change[how]))


@pytest.mark.parametrize("name", ["q_bias", "v_bias", "k_norm", "mlp_out_norm"])
def test_half_an_option_is_refused(weights: GroupWeights, name: str) -> None:
    layer = replace(weights.layers[1], **{name: None})  # type: ignore[arg-type]
    group = native_or_skip().bind(replace(weights, layers=(weights.layers[0], layer)))
    hidden = np.ones((ROWS, weights.shape.hidden_size), np.float32)

    with pytest.raises(KernelError, match=r"layer 1 of the group.*sizes disagree"):
        group.forward(hidden, [new_slice(replace(weights, layers=weights.layers[:2]))])


def test_norms_of_another_length_and_sizes_that_cannot_be_are_refused(
    weights: GroupWeights,
) -> None:
    short = replace(weights.layers[0], post_norm=weights.layers[0].post_norm[:-1])

    with pytest.raises(KernelError, match="post_norm of layer 0"):
        native_or_skip().bind(replace(weights, layers=(short, *weights.layers[1:])))
    with pytest.raises(KernelError, match="sizes"):
        native_or_skip().bind(replace(weights, shape=replace(weights.shape, num_heads=2**31)))


@pytest.mark.parametrize("how", WRONG_HIDDEN)
def test_matmul_refuses_activations_that_it_would_misread(how: str) -> None:
    backend = native_or_skip()
    from shared.kernel import native

    matrix = random_matrix(np.random.default_rng(1), "int4", 16, 2)

    with pytest.raises(KernelError):
        native.matmul(backend, matrix, WRONG_HIDDEN[how](np.ones((ROWS, 64), np.float32)))


def test_single_operations_refuse_other_types() -> None:
    backend = native_or_skip()
    from shared.kernel import native

    numbers = np.ones(16)
    with pytest.raises(KernelError):
        native.exp(backend, numbers)
    with pytest.raises(KernelError):
        native.to_half(backend, numbers)
    with pytest.raises(KernelError):
        native.from_half(backend, numbers)


@pytest.mark.parametrize(
    ("rows", "cols", "chunk_rows"),
    [(-1, -4, 0), (2**40, 0, 0), (0, 2**40, 0), (2, 2, 2**40), (2, 2, -1)],
)
def test_a_matrix_of_impossible_sizes_is_refused(rows: int, cols: int, chunk_rows: int) -> None:
    """Their products can fit the bytes."""
    with pytest.raises(KernelError):
        PackedMatrix("f32", rows, cols, chunk_rows, np.zeros(max(0, 4 * rows * cols), np.uint8))
