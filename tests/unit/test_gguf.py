"""The GGUF reader: what it reads, and that what it cannot use is one clear ModelError."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.formats.description import Int4Blocks, Int8Blocks
from shared.formats.gguf import read_gguf
from shared.formats.gguf_file import open_gguf
from shared.manifest import TensorKind
from tests.gguf_files import CHAT_TEMPLATE, TinyModel, removed, tiny_tokens, write_gguf


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny Model.gguf")


def dequantised(blocks: Int4Blocks | Int8Blocks | np.ndarray) -> np.ndarray:
    """float32 (R, C) by the words of the description's docstrings."""
    match blocks:
        case Int4Blocks(scale, low, nibbles):
            q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float32)
            values = np.float32(scale)[:, :, None] * q + np.float32(low)[:, :, None]
        case Int8Blocks(scale, q):
            values = np.float32(scale)[:, :, None] * q.astype(np.float32)
        case values:
            return values
    return values.reshape(len(values), -1)


def test_config_comes_from_the_metadata(tiny_file: Path) -> None:
    config = read_gguf(tiny_file).config

    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 96, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.vocab_size == len(tiny_tokens())
    assert config.max_position_embeddings == 128
    assert config.rope_pairing == "interleaved"
    assert config.rope_theta == 10_000.0
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_vocabulary_and_template_come_from_the_metadata(tiny_file: Path) -> None:
    description = read_gguf(tiny_file)

    assert description.source == "Tiny Model.gguf"
    assert description.vocabulary.tokens == tuple(tiny_tokens())
    assert description.vocabulary.pre == "smollm"
    assert description.chat_template == CHAT_TEMPLATE


def test_head_dim_and_more_end_tokens_are_read_when_given(tmp_path: Path) -> None:
    model = TinyModel(
        metadata={
            "llama.attention.key_length": 16,
            "tokenizer.ggml.eot_token_id": 0,
            "tokenizer.ggml.eom_token_id": 2,
        }
    )

    config = read_gguf(write_gguf(tmp_path / "m.gguf", model)).config

    assert config.head_dim == 16
    assert config.eos_token_ids == (2, 0)


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    description = read_gguf(write_gguf(tmp_path / "m.gguf", TinyModel(tied=False)))

    assert not description.config.tie_word_embeddings
    assert description.tensors["lm_head"].rows == len(tiny_tokens())


@pytest.mark.parametrize(
    ("matrix_type", "kind"),
    [("Q4_0", TensorKind.INT4), ("Q4_1", TensorKind.INT4), ("Q8_0", TensorKind.INT8)],
)
def test_numbers_equal_the_gguf_package_dequantiser(
    tmp_path: Path, matrix_type: str, kind: TensorKind
) -> None:
    model = TinyModel(matrix_type=matrix_type)
    path = write_gguf(tmp_path / "m.gguf", model)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}

    description = read_gguf(path)

    assert description.tensors["layer.0.q_proj"].kind is kind
    assert len(description.tensors) == len(theirs)
    for view in description.tensors.values():
        tensor = theirs[view.source_name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = dequantised(view.read())
        np.testing.assert_array_equal(ours, expected.reshape(view.rows, view.cols))


def test_container_agrees_with_the_gguf_package(tiny_file: Path) -> None:
    theirs = gguf.GGUFReader(tiny_file)

    ours = open_gguf(tiny_file)

    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents()
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(
            ours.tensors[tensor.name].raw, tensor.data.view(np.uint8).reshape(-1)
        )


WRONG_MODELS = {
    "a part": (
        TinyModel(metadata={"split.count": 3, "split.no": 1}),
        "it is part 2 of 3 of a model that was split",
    ),
    "architecture": (TinyModel(architecture="mamba"), "'mamba'; supported: .*llama"),
    "experts": (TinyModel(metadata={"llama.expert_count": 8}), "expert_count"),
    "dynamic rope": (
        TinyModel(
            metadata={"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0}
        ),
        "rope scaling 'dynamic' is not supported",
    ),
    "yarn without factor": (
        TinyModel(metadata={"llama.rope.scaling.type": "yarn"}),
        "llama.rope.scaling.factor is missing",
    ),
    "too few rope factors": (
        TinyModel(tensors={"rope_freqs.weight": (np.ones(7), "F32")}),
        "7 entries, a head has 8 pairs",
    ),
    "a rope factor of zero": (
        TinyModel(tensors={"rope_freqs.weight": (np.zeros(8), "F32")}),
        "short_factors must lie in",
    ),
    "odd rope": (TinyModel(metadata={"llama.rope.dimension_count": 7}), "rope_dim must be even"),
    "value length": (TinyModel(metadata={"llama.attention.value_length": 8}), "value_length 8"),
    "missing key": (TinyModel(metadata={"llama.context_length": removed()}), "context_length"),
    "wrong key type": (TinyModel(metadata={"llama.block_count": "two"}), "block_count must be int"),
    "many layers": (TinyModel(metadata={"llama.block_count": 2**31 - 1}), "block_count"),
    "no heads": (TinyModel(metadata={"llama.attention.head_count": 0}), "head_count is 0"),
    "odd heads": (TinyModel(metadata={"llama.attention.head_count": 3}), "must be a multiple"),
    "missing tensor": (
        TinyModel(tensors={"blk.1.ffn_up.weight": removed()}),
        "blk.1.ffn_up.weight is missing",
    ),
    "no embedding": (
        TinyModel(tensors={"token_embd.weight": removed()}),
        "token_embd.weight is missing",
    ),
    "bias": (
        TinyModel(tensors={"blk.0.attn_q.bias": (np.ones(64), "F32")}),
        "'blk.0.attn_q.bias' has no place",
    ),
    "third layer": (
        TinyModel(tensors={"blk.2.attn_norm.weight": (np.ones(64), "F32")}),
        "'blk.2.attn_norm.weight' has no place",
    ),
    "wrong shape": (
        TinyModel(tensors={"blk.0.attn_k.weight": (np.ones((64, 64)), "Q8_0")}),
        "attn_k.weight has shape",
    ),
    "another quantisation": (
        TinyModel(tensors={"blk.0.attn_k.weight": (np.zeros((32, 256)), "TQ1_0")}),
        "attn_k.weight has",
    ),
    "too few tokens": (TinyModel(metadata={"tokenizer.ggml.tokens": ["a", "b"]}), "2 tokens"),
    "eos outside": (TinyModel(metadata={"tokenizer.ggml.eos_token_id": 99_999}), "99999"),
    "no merges": (TinyModel(metadata={"tokenizer.ggml.merges": removed()}), "ggml.merges"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_what_the_kernel_cannot_run_is_refused_by_name(tmp_path: Path, case: str) -> None:
    model, named = WRONG_MODELS[case]
    path = write_gguf(tmp_path / "m.gguf", model)

    with pytest.raises(ModelError, match=named) as caught:
        read_gguf(path)

    assert caught.value.remedy


def q4_blocks(rows: int, cols: int, scale: float, *, kind: str) -> np.ndarray:
    halves = {"Q4_0": 1, "Q4_1": 2}[kind]
    blocks = np.zeros((rows, cols // 32, 2 * halves + 16), np.uint8)
    blocks[:, :, : 2 * halves] = np.full(halves, scale, np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(
    ("kind", "scale", "named"),
    [
        ("Q4_1", np.nan, "attn_k.weight holds NaN or infinity"),
        ("Q4_1", np.inf, "attn_k.weight holds NaN or infinity"),
        ("Q4_0", 8200.0, "attn_k.weight has a scale or a minimum that overflows fp16"),
        ("Q4_0", np.nan, "attn_k.weight holds NaN or infinity"),
    ],
)
def test_scales_that_are_not_finite_are_refused(
    tmp_path: Path, kind: str, scale: float, named: str
) -> None:
    tensor = (q4_blocks(32, 64, scale, kind=kind), kind)
    model = TinyModel(tensors={"blk.0.attn_k.weight": tensor})
    view = read_gguf(write_gguf(tmp_path / "m.gguf", model)).tensors["layer.0.k_proj"]

    with pytest.raises(ModelError, match=named):
        view.read()


def test_a_norm_with_nan_is_refused(tmp_path: Path) -> None:
    norm = np.full(64, np.nan, np.float32)
    model = TinyModel(tensors={"output_norm.weight": (norm, "F32")})
    view = read_gguf(write_gguf(tmp_path / "m.gguf", model)).tensors["norm"]

    with pytest.raises(ModelError, match=r"output_norm\.weight holds NaN"):
        view.read()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"nothing known" * 9, "magic"),
        (b"PK\x03\x04" + bytes(100), "zip archive, as torch.save writes"),
        (b"\x80\x02}q\x00" + bytes(100), "pickle, which can run code"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (bytes(8) + b'{"a":{}}', "magic"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "number of metadata items"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=named) as caught:
        read_gguf(path)

    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf"):
        read_gguf(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("item", [0, 7, 10, 8, 9])  # uint8, bool, uint64, string, array
def test_an_array_longer_than_the_file_is_refused_before_it_is_made(
    tmp_path: Path, item: int
) -> None:
    key = b"general.x"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    path = tmp_path / "m.gguf"
    path.write_bytes(head + struct.pack("<IIQ", 9, item, 2**62) + bytes(64))

    with pytest.raises(ModelError, match=r"general\.x"):
        open_gguf(path)


def test_every_truncation_is_refused(tmp_path: Path, tiny_file: Path) -> None:
    whole = tiny_file.read_bytes()
    path = tmp_path / "m.gguf"
    header = [*range(0, 1200, 7), *range(1200, len(whole), 1009), len(whole) - 1]

    for length in header:
        path.write_bytes(whole[:length])

        with pytest.raises(ModelError):
            read_gguf(path)


def test_tensors_that_overlap_are_refused(tmp_path: Path, tiny_file: Path) -> None:
    """Else a small file could stand for any number of large tensors."""
    content = bytearray(tiny_file.read_bytes())
    name = b"blk.0.attn_k.weight"
    # name, number of dimensions, two sizes, type; then the offset
    at = content.index(name) + len(name) + 4 + 16 + 4
    (offset,) = struct.unpack_from("<Q", content, at)
    struct.pack_into("<Q", content, at, offset - 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match="overlaps the one before it"):
        read_gguf(path)


def test_a_header_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 10))
        for number in range(1 << 10):  # each an array of as many bytes as are allowed at once
            name = b"%05d" % number
            file.write(struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 0, 1 << 22))
            file.seek(1 << 22, 1)  # a hole, which reads as zeros
        file.truncate(file.tell())

    tracemalloc.start()
    with pytest.raises(ModelError, match="not a usable GGUF file"):
        open_gguf(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 80 << 20


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_a_mutated_header_is_read_or_refused_and_nothing_else(
    tmp_path: Path, tiny_file: Path, edits: list[tuple[float, int]]
) -> None:
    content = bytearray(tiny_file.read_bytes())
    header_bytes = len(content) - sum(t.raw.nbytes for t in open_gguf(tiny_file).tensors.values())
    for where, value in edits:
        content[int(where * header_bytes)] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    tracemalloc.start()
    # Any exception but ModelError fails the test.
    with contextlib.suppress(ModelError):
        for view in read_gguf(path).tensors.values():
            view.read()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 16 << 20
