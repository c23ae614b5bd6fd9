"""Facts about a whole tiny model: its bits do not depend on how the work is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError, KvMissing
from shared.manifest import TensorKind
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.model.rope import RopeScaling
from tests.kernel_backends import every_backend, every_path, load_group, native_paths
from tests.tiny_model import TinyModel, tiny_model

NUM_TOKENS = 37
ALL_OPTIONS: dict[str, object] = {
    "rope_pairing": "half",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "qk_norm": True,
    "post_norms": True,
    "embedding_scale": 8.0,
    "attention_scale": 0.2,
    "attention_softcap": 5.0,
    "logit_softcap": 3.0,
    "sliding_window": 13,
    "sliding_layers": (0, 1, 3),
    "local_rope_theta": 500.0,
    "rope_free_layers": (1,),
    "rope_scaling": RopeScaling("linear", 4.0),
}
VARIANTS: dict[str, dict[str, object]] = {
    "tied": {},
    "half pairing, untied, int8": {
        "rope_pairing": "half",
        "tie_word_embeddings": False,
        "layer_kind": TensorKind.INT8,
        "vocab_size": 250,
    },
    "one wide kv head": {"num_key_value_heads": 1, "head_dim": 96, "hidden_size": 160},
    "every head its own kv, narrow": {"num_key_value_heads": 4, "head_dim": 8},
    "biases and norms of heads": {"qkv_bias": True, "qk_norm": True},
    "norms of what is added, gelu": {"post_norms": True, "activation": "gelu_tanh"},
    "a window of one page": {"sliding_window": 16, "sliding_layers": (0, 1, 2, 3)},
    "a window across pages, one kv head": {
        "sliding_window": 21,
        "sliding_layers": (1, 3),
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "a window of one position": {"sliding_window": 1, "sliding_layers": (2,)},
    "soft caps": {"attention_softcap": 0.7, "logit_softcap": 0.5},
    "layers without rope": {"rope_free_layers": (0, 3), "attention_scale": 0.3},
    "all options": ALL_OPTIONS,
}


def prompt(seed: int = 0, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, num_tokens).astype(np.int32)


def run_whole(group: LayerGroup, tokens: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Hidden states and KV rows of a prompt in one piece."""
    cache = group.new_cache()
    hidden = group.forward(group.embed(tokens), [SequenceSlice(cache, 0, len(tokens))])
    return hidden, cache.export_rows(0, len(tokens))


@pytest.fixture(scope="module", params=["a llama", "all options"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model() if request.param == "a llama" else tiny_model(5, **ALL_OPTIONS)  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[(path, threads) for path in native_paths for threads in (1, 3)] + [("reference", 1)],
)
def group(request: pytest.FixtureRequest, model: TinyModel) -> LayerGroup:
    path, num_threads = request.param
    return load_group(model, path, num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@every_path
def test_of_equal_logits_the_first_is_the_largest(path: str, num_threads: int) -> None:
    group = load_group(tiny_model(3), path, num_threads=num_threads)
    silence = np.zeros((2, group.config.hidden_size), np.float32)  # logits of 0 and -0

    assert not group.logits(silence).any()
    assert group.head(silence).largest == [0, 0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@every_path
def test_native_equals_the_reference(path: str, num_threads: int, variant: str) -> None:
    other = tiny_model(3, **VARIANTS[variant])  # type: ignore[arg-type]
    native = load_group(other, path, num_threads=num_threads)
    reference = load_group(other, "reference")

    hidden, rows = run_whole(native, prompt())
    want_hidden, want_rows = run_whole(reference, prompt())

    assert hidden.tobytes() == want_hidden.tobytes()
    assert rows == want_rows
    assert native.logits(hidden).tobytes() == reference.logits(hidden).tobytes()
    assert native.head(hidden).largest == reference.head(hidden).largest
    assert np.isfinite(hidden).all()
    assert len(np.unique(hidden)) > hidden.size // 2


@given(cuts=st.lists(st.integers(1, NUM_TOKENS - 1), max_size=5, unique=True))
@settings(max_examples=15, deadline=None)
def test_the_chunking_of_a_prompt_does_not_matter(group: LayerGroup, cuts: list[int]) -> None:
    want_hidden, want_rows = run_whole(group, prompt())
    bounds = [0, *sorted(cuts), NUM_TOKENS]
    cache = group.new_cache()

    pieces = [
        group.forward(
            group.embed(prompt()[start:stop]), [SequenceSlice(cache, start, stop - start)]
        )
        for start, stop in itertools.pairwise(bounds)
    ]

    assert np.concatenate(pieces).tobytes() == want_hidden.tobytes()
    assert cache.export_rows(0, NUM_TOKENS) == want_rows


@given(
    starts=st.lists(st.integers(0, 20), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 17), min_size=5, max_size=5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None)
def test_the_neighbours_in_a_batch_do_not_matter(
    group: LayerGroup, starts: list[int], sizes: list[int], order: object
) -> None:
    wholes = [run_whole(group, prompt(i)) for i in range(len(starts))]
    indices = list(range(len(starts)))
    order.shuffle(indices)  # type: ignore[attr-defined]
    slices, inputs, wanted = [], [], []
    for i in indices:
        cache = group.new_cache()
        cache.import_rows(0, wholes[i][1][: starts[i] * cache.row_bytes])
        part = slice(starts[i], starts[i] + sizes[i])
        slices.append(SequenceSlice(cache, starts[i], sizes[i]))
        inputs.append(group.embed(prompt(i)[part]))
        wanted.append(wholes[i][0][part])

    hidden = group.forward(np.concatenate(inputs), slices)

    assert hidden.tobytes() == np.concatenate(wanted).tobytes()


@pytest.mark.parametrize(
    "bounds", [[(0, 1), (1, 4)], [(0, 2), (2, 4)], [(i, i + 1) for i in range(4)]]
)
@every_backend
def test_the_cut_of_the_layers_does_not_matter(
    model: TinyModel, backend_name: str, bounds: list[tuple[int, int]]
) -> None:
    whole = load_group(model, backend_name)
    want, _ = run_whole(whole, prompt())
    parts = [load_group(model, backend_name, first, end) for first, end in bounds]

    hidden = parts[0].embed(prompt())
    for part in parts:
        hidden = part.forward(hidden, [SequenceSlice(part.new_cache(), 0, NUM_TOKENS)])

    assert hidden.tobytes() == want.tobytes()
    assert parts[-1].logits(hidden[-1:]).tobytes() == whole.logits(want[-1:]).tobytes()


def test_rows_recomputed_from_an_earlier_position_replace_the_later_ones(
    group: LayerGroup,
) -> None:
    want, want_rows = run_whole(group, prompt())
    cache = group.new_cache()
    group.forward(group.embed(prompt(9)), [SequenceSlice(cache, 0, NUM_TOKENS)])

    hidden = group.forward(group.embed(prompt()), [SequenceSlice(cache, 0, NUM_TOKENS)])

    assert hidden.tobytes() == want.tobytes()
    assert cache.export_rows(0, NUM_TOKENS) == want_rows


def test_the_input_is_left_as_it_was(group: LayerGroup) -> None:
    hidden = group.embed(prompt())
    before = hidden.copy()

    group.forward(hidden, [SequenceSlice(group.new_cache(), 0, NUM_TOKENS)])

    assert hidden.tobytes() == before.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_hidden_states_that_are_not_finite_name_their_row_and_leave_no_kv(
    group: LayerGroup, bad: float
) -> None:
    hidden = group.embed(prompt())
    hidden[20, 3] = bad
    cache = group.new_cache()

    with pytest.raises(KernelError, match=r"layer 0 of the group.*batch row 20"):
        group.forward(hidden, [SequenceSlice(cache, 0, NUM_TOKENS)])

    assert cache.num_positions == 0


def test_a_token_outside_the_vocabulary_is_refused(group: LayerGroup) -> None:
    for token in (-1, 256):
        with pytest.raises(KernelError, match="row 1: a token id"):
            group.embed(np.array([0, token], np.int32))


def test_missing_rows_of_the_cache_are_not_computed_around(group: LayerGroup) -> None:
    cache = group.new_cache()

    with pytest.raises(KvMissing, match=r"0\.\.5 are missing"):
        group.forward(group.embed(prompt()[:1]), [SequenceSlice(cache, 5, 1)])


def test_a_malformed_batch_is_refused(group: LayerGroup) -> None:
    hidden = group.embed(prompt()[:4])
    cache = group.new_cache()

    with pytest.raises(KernelError, match="shape"):
        group.forward(hidden, [SequenceSlice(cache, 0, 3)])
    with pytest.raises(KernelError, match="shape"):
        group.forward(hidden[:0], [])
    with pytest.raises(KernelError, match="once"):
        group.forward(hidden, [SequenceSlice(cache, 0, 2), SequenceSlice(cache, 0, 2)])
    with pytest.raises(KernelError, match=r"254\.\.258"):
        group.forward(hidden, [SequenceSlice(cache, 254, 4)])


def test_the_last_position_of_the_model_can_be_computed(group: LayerGroup) -> None:
    cache = group.new_cache()
    cache.import_rows(0, bytes(255 * cache.row_bytes))

    hidden = group.forward(group.embed(prompt()[:1]), [SequenceSlice(cache, 255, 1)])

    assert np.isfinite(hidden).all()
    assert cache.num_positions == 256


def test_caches_have_the_size_that_the_config_promises(group: LayerGroup) -> None:
    cache: SequenceCache = group.new_cache()

    assert cache.row_bytes == 4 * group.config.kv_row_bytes_per_layer


@pytest.mark.parametrize(
    "token_ids",
    [np.array([2**40 + 1]), np.zeros((2, 2), np.int32), np.array([1.5, 2.0]), np.int32(3)],
    ids=["int64", "matrix", "floats", "scalar"],
)
def test_token_ids_of_another_form_are_refused(group: LayerGroup, token_ids: np.ndarray) -> None:
    with pytest.raises(KernelError, match="token ids must be int32"):
        group.embed(np.asarray(token_ids))


@pytest.mark.parametrize("shape", [(1, 63), (1, 128), (64,), (0,), (1, 1, 64)])
def test_hidden_rows_of_another_size_are_refused(group: LayerGroup, shape: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match="hidden rows must be"):
        group.logits(np.zeros(shape, np.float32))
