"""Evaluation stage by stage gives what the whole model gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.loader.packed import open_packed
from services.quality.evaluate import evaluate
from services.quality.footprint import footprint_of
from services.quality.scores import log_softmax
from services.quality.stages import FloatStages, KernelModel
from services.quality.windows import Windows, cut_windows
from shared.errors import ConfigError, ModelError
from shared.formats.gguf import read_gguf
from shared.model.backend import pick_backend
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import TinyModel, write_gguf

TEXT = "hello world, " * 12
WINDOW = 32


class Opened:
    """A tiny model in both arithmetics, and windows of a text."""

    def __init__(self, folder: Path, model: TinyModel) -> None:
        path = write_gguf(folder / "model.gguf", model)
        self.packed = open_packed(path, folder / "cache")
        self.description = read_gguf(path)
        tokenizer = Tokenizer.from_vocabulary(self.description.vocabulary)
        self.windows = cut_windows(TEXT, tokenizer, window=WINDOW)

    def kernel(self) -> KernelModel:
        return KernelModel(self.packed.manifest, self.packed.read_shard, pick_backend())

    def floats(self) -> FloatStages:
        return FloatStages(self.description.config, self.description.tensors)

    def whole(self) -> LayerGroup:
        config = ModelConfig.from_dict(self.packed.manifest.config)
        return LayerGroup.load(
            config, self.packed.manifest, 0, config.num_hidden_layers, self.packed.read_shard,
            first=True, last=True, backend=pick_backend(),
        )  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("model"), TinyModel())


def test_perplexity_is_that_of_the_whole_model_over_the_second_halves(opened: Opened) -> None:
    group, losses = opened.whole(), []
    for ids in opened.windows.inputs:
        cache = group.new_cache()
        hidden = group.forward(group.embed(ids), [SequenceSlice(cache, 0, WINDOW)])
        logs = log_softmax(group.logits(hidden))
        losses += [-logs[at, ids[at + 1]] for at in range(WINDOW // 2, WINDOW - 1)]

    found = evaluate(opened.kernel(), opened.windows)

    assert found.perplexity.num_scored == len(losses)
    assert found.perplexity.mean_loss == np.mean(losses)
    assert found.divergence is None
    assert found.layers == ()


def test_a_model_is_no_distance_from_itself(opened: Opened) -> None:
    found = evaluate(opened.floats(), opened.windows, reference=opened.floats())

    assert found.divergence is not None
    assert found.divergence.max_kl == 0
    assert found.divergence.top1_agreement == 1
    assert found.divergence.perplexity_ratio == 1
    assert [layer.relative_rms for layer in found.layers] == [0, 0]


def test_the_kernel_is_near_binary32_and_not_the_same(opened: Opened) -> None:
    found = evaluate(opened.kernel(), opened.windows, reference=opened.floats())

    assert found.divergence is not None
    assert 0 < found.divergence.mean_kl < 1e-3
    assert all(0 < layer.relative_rms < 0.02 for layer in found.layers)
    assert found.reference_perplexity is not None
    assert found.reference_perplexity.value == pytest.approx(found.perplexity.value, rel=0.01)


def test_a_model_with_other_weights_is_far(opened: Opened, tmp_path: Path) -> None:
    other = Opened(tmp_path, TinyModel(seed=8))

    found = evaluate(other.floats(), opened.windows, reference=opened.floats())

    assert found.divergence is not None
    assert found.divergence.mean_kl > 0.05
    assert found.layers[0].relative_rms > 0.5


def test_a_layers_error_is_of_what_the_layer_gives(opened: Opened) -> None:
    kernel, floats = opened.kernel(), opened.floats()
    (found, _) = evaluate(kernel, opened.windows, reference=floats).layers

    ours = np.concatenate([kernel.layer(0)(kernel.embed(ids)) for ids in opened.windows.inputs])
    theirs = np.concatenate([floats.layer(0)(floats.embed(ids)) for ids in opened.windows.inputs])
    expected = np.sqrt(np.square(ours - theirs).sum() / np.square(theirs).sum())
    assert found.relative_rms == pytest.approx(expected, rel=1e-4)


def test_progress_ends_with_all_steps_done(opened: Opened) -> None:
    told: list[tuple[int, int]] = []

    evaluate(
        opened.kernel(),
        opened.windows,
        reference=opened.floats(),
        progress=lambda done, total: told.append((done, total)),
    )

    num_windows, num_layers = len(opened.windows.inputs), 2
    total = 2 * num_windows * (num_layers + 1)
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("change", [{"layers": 3}, {"hidden": 128, "heads": 8}])
def test_another_model_is_no_reference(
    opened: Opened, tmp_path: Path, change: dict[str, int]
) -> None:
    other = Opened(tmp_path, replace(TinyModel(), **change))

    with pytest.raises(ConfigError, match="--reference is another model"):
        evaluate(opened.floats(), opened.windows, reference=other.floats())


def test_a_window_longer_than_the_models_context_is_refused(opened: Opened) -> None:
    ids = np.zeros((1, 129), np.int32)

    with pytest.raises(ConfigError, match="--window 129 is longer than the model's context of 128"):
        evaluate(opened.floats(), Windows(ids, ids[:, 65:], 64, 129))


@pytest.mark.parametrize(
    ("tensor", "where"), [("blk.1.attn_norm.weight", "layer 1"), ("output_norm.weight", "the head")]
)
def test_numbers_that_grow_beyond_all_bounds_are_told_of(
    tmp_path: Path, tensor: str, where: str
) -> None:
    huge = (np.full(TinyModel().hidden, 3e38, np.float32), "F32")
    opened = Opened(tmp_path, replace(TinyModel(), tensors={tensor: huge}))

    with pytest.raises(ModelError, match=f"{where} gives numbers that are not finite"):
        evaluate(opened.floats(), opened.windows)


def test_a_footprint_counts_every_weight(opened: Opened) -> None:
    footprint = footprint_of(opened.packed.manifest)

    shapes = TinyModel().shapes()
    assert footprint.num_parameters == sum(int(np.prod(shape)) for shape in shapes.values())
    bits = {kind.kind: kind.bits_per_weight for kind in footprint.kinds}
    assert 5.0 <= bits["int4"] < 5.5  # padding of small chunks
    assert 8.5 <= bits["int8"] < 9.0
    assert bits["f32"] == 32.0
    assert footprint.layers_in_256_mib == footprint.num_layers == 2
