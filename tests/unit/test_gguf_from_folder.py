"""A Hugging Face folder as a GGUF file: the same model, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.quality.quantize import QuantizeOptions, quantize_file
from services.quality.tensors import Method
from shared.errors import ModelError
from shared.formats.gguf import read_gguf
from shared.formats.gguf_file import open_gguf
from shared.formats.gguf_from_folder import write_gguf_from
from shared.formats.model import read_model
from shared.model.float_model import FloatModel
from shared.text.tokenizer import Tokenizer
from tests.full_disk import full_disk
from tests.hf_folders import byte_tokenizer
from tests.hf_folders import write_folder as write_byte_folder

LLAMA: dict[str, Any] = {}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
TEXT = "a byte, and another: \u00e9\u20ac <s> 12345"


def write_folder(folder: Path, **options: Any) -> Path:
    """A folder whose tokenizer has merges."""
    write_byte_folder(folder, **options)
    document = json.loads(byte_tokenizer())
    for index, merge in enumerate(("a n", "an d", "t h", "Ġ a", "1 2")):
        document["model"]["vocab"][merge.replace(" ", "")] = 259 + index
        document["model"]["merges"].append(merge.split())
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def logits_of(path: Path) -> np.ndarray:
    description = read_model(path)
    views = description.tensors
    model = FloatModel(
        description.config, lambda name: views[name].read_float32(0, views[name].rows)
    )
    return model.logits(np.arange(3, 40), model.new_cache())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_tensors_keep_their_type_and_numbers(tmp_path: Path, dtype: str) -> None:
    folder = write_folder(tmp_path / "folder", dtype=dtype)

    write_gguf_from(read_model(folder), tmp_path / "made.gguf")

    kinds = {t.type_name for t in open_gguf(tmp_path / "made.gguf").tensors.values()}
    assert kinds == {dtype, "F32"}
    made = read_model(tmp_path / "made.gguf").tensors
    for key, view in read_model(folder).tensors.items():
        ours, theirs = made[key].read_float32(0, view.rows), view.read_float32(0, view.rows)
        if key.endswith(("q_proj", "k_proj")):  # whose rows lie in another order
            ours, theirs = np.sort(ours, axis=0), np.sort(theirs, axis=0)
        assert np.array_equal(ours, theirs), key


@pytest.mark.parametrize("changes", [LLAMA, QWEN2, QWEN3, UNTIED], ids=str)
def test_the_file_computes_what_the_folder_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "folder", **changes)

    write_gguf_from(read_model(folder), tmp_path / "made.gguf")

    # Rows of q and k may lie in another order, so scores are sums in another order.
    assert np.allclose(logits_of(tmp_path / "made.gguf"), logits_of(folder), rtol=1e-4, atol=1e-3)


def test_the_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    description = read_model(write_folder(tmp_path / "folder"))

    write_gguf_from(description, tmp_path / "made.gguf")

    ours = Tokenizer.from_vocabulary(read_gguf(tmp_path / "made.gguf").vocabulary)
    theirs = Tokenizer.from_vocabulary(description.vocabulary)
    for parse_special in (False, True):
        ids = ours.encode(TEXT, parse_special=parse_special)
        assert ids == theirs.encode(TEXT, parse_special=parse_special)
        assert ours.decode(ids, skip_special=False) == TEXT


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, "sliding_window 16"),
        (
            {"rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }},
            "rope_scaling",
        ),
    ],
)  # fmt: skip
def test_what_the_file_could_not_tell_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    folder = write_folder(tmp_path / "folder", **changes)

    message = f"cannot be written as GGUF: no GGUF key is written for {what}"
    with pytest.raises(ModelError, match=message):
        write_gguf_from(read_model(folder), tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize("num_bytes", [1000, 40_000])
def test_a_full_disk_is_told_of_and_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    description = read_model(write_folder(tmp_path / "folder"))

    with full_disk(num_bytes), pytest.raises(ModelError, match=r"cannot be written: (?!None)"):
        write_gguf_from(description, tmp_path / "made.gguf")

    assert not (tmp_path / "made.gguf").exists()


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its tokenizer has no merges"):
        write_gguf_from(read_model(write_byte_folder(tmp_path / "bytes")), tmp_path / "made.gguf")

    folder = write_folder(tmp_path / "folder")
    document = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "[xyz]+"}, "behavior": "Isolated"}
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split | {"invert": False}, document["pre_tokenizer"]],
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="GGUF has no name for the way"):
        write_gguf_from(read_model(folder), tmp_path / "made.gguf")


def test_a_folder_is_quantised_into_one_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")

    report = quantize_file(
        folder,
        tmp_path / "made.gguf",
        QuantizeOptions(4, Method.RANGE),
        progress=lambda stage, done, total: None,
    )

    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "made.gguf"]
    assert {unit.type_name for unit in report.units} == {"Q4_1"}
    assert read_model(tmp_path / "made.gguf").config.vocab_size == 288
