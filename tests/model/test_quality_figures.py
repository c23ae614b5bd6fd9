"""The figures of a real model in docs/quality.md: beside llama.cpp's, and of each method."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from services.loader.packed import open_packed
from services.quality.evaluate import Evaluation, evaluate
from services.quality.quantize import QuantizeOptions, quantize_file
from services.quality.scores import Divergence
from services.quality.stages import FloatStages, KernelModel
from services.quality.tensors import Method
from services.quality.windows import cut_windows
from shared.formats.gguf import read_gguf
from shared.model.backend import pick_backend
from shared.text.tokenizer import Tokenizer
from tests.shuffled_model import write_shuffled

LICENCE = Path("/usr/share/common-licenses/GPL-3")  # of Debian's base-files
LICENCE_SHA256 = "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986"
# llama-perplexity (llama.cpp of 2026-10, native build), -c 512, the same model file and text: after
# two windows, and after all fourteen.
LLAMA_CPP_TWO, LLAMA_CPP_ALL = 17.8938, 18.3914


@pytest.fixture(scope="module")
def licence() -> str:
    if not LICENCE.is_file():
        pytest.skip(f"{LICENCE} is not here")
    raw = LICENCE.read_bytes()
    if hashlib.sha256(raw).hexdigest() != LICENCE_SHA256:
        pytest.skip(f"{LICENCE} is another text than the one that was measured")
    return raw.decode()


def kernel_evaluation(path: Path, cache_dir: Path, text: str, max_windows: int = 0) -> Evaluation:
    packed = open_packed(path, cache_dir)
    tokenizer = Tokenizer.from_vocabulary(read_gguf(path).vocabulary)
    cut = cut_windows(text, tokenizer, window=512, max_windows=max_windows)
    return evaluate(KernelModel(packed.manifest, packed.read_shard, pick_backend()), cut)


@pytest.mark.real_model
def test_perplexity_on_two_windows_is_near_llama_cpps(
    real_model_path: Path, tmp_path: Path, licence: str
) -> None:
    found = kernel_evaluation(real_model_path, tmp_path, licence, max_windows=2)

    # Two windows are few: what each arithmetic rounds does not cancel out yet.
    assert found.perplexity.value == pytest.approx(LLAMA_CPP_TWO, rel=0.02)
    assert found.num_tokens == 7639


@pytest.mark.slow
@pytest.mark.real_model
def test_perplexity_on_a_whole_text_is_within_one_percent_of_llama_cpps(
    real_model_path: Path, tmp_path: Path, licence: str
) -> None:
    found = kernel_evaluation(real_model_path, tmp_path, licence)

    assert found.num_windows == 14
    assert found.perplexity.value == pytest.approx(LLAMA_CPP_ALL, rel=0.01)


def loss_of(path: Path, source: Path, text: str) -> Divergence:
    ours, theirs = read_gguf(path), read_gguf(source)
    tokenizer = Tokenizer.from_vocabulary(theirs.vocabulary)
    found = evaluate(
        FloatStages(ours.config, ours.tensors),
        cut_windows(text, tokenizer, window=512, max_windows=8),
        reference=FloatStages(theirs.config, theirs.tensors),
    )
    assert found.divergence is not None
    return found.divergence


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_a_calibrated_search_loses_at_most_half_of_symmetric_int4(
    real_model_path: Path, tmp_path: Path, licence: str
) -> None:
    source = write_shuffled(real_model_path, tmp_path / "source.gguf")
    same = loss_of(real_model_path, source, licence)
    assert same.mean_kl < 1e-5, "the source must be the same function"
    manual = "\n\n".join(topics[name] for name in sorted(topics))  # another kind of text
    losses = {}
    for name, options in {
        "symmetric": QuantizeOptions(4, Method.SYMMETRIC),
        "search": QuantizeOptions(4, Method.SEARCH, manual, calibration_windows=8, num_threads=2),
        "at 4.6 bits": QuantizeOptions(
            4, Method.SEARCH, manual, calibration_windows=8, max_bits_per_weight=4.6, num_threads=2
        ),
        "int8": QuantizeOptions(8, Method.SEARCH, manual, calibration_windows=8, num_threads=2),
    }.items():
        target = tmp_path / "made.gguf"
        quantize_file(source, target, options, progress=lambda stage, done, total: None)
        losses[name] = loss_of(target, source, licence).mean_kl
    print(losses)

    assert losses["search"] <= losses["symmetric"] / 2
    assert losses["at 4.6 bits"] <= losses["symmetric"] / 2
    assert losses["int8"] < 0.001
