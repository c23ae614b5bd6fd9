"""What the shorter wires cost: the same model and texts, beside what the f32 wire gives.

T positions, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.loader.packed import PackedModel, open_packed
from shared.formats.gguf import read_gguf
from shared.messages import ChatMessage
from shared.model.backend import pick_backend
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from shared.topology import Layout, Wire, even_layout
from shared.wire import over_a_hop
from tests.model.quality_texts import ANSWER, FOREIGN, QUESTION
from tests.model.test_quality import Float64, log_softmax

pytestmark = pytest.mark.real_model

NUM_GROUPS = (2, 3, 30)
Forward = Callable[[int, Wire], Float64]


@pytest.fixture(scope="module")
def packed(real_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return open_packed(real_model_path, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def sequences(real_model_path: Path) -> list[list[int]]:
    """The token ids of a chat and of texts of several kinds."""
    description = read_gguf(real_model_path)
    tokenizer = Tokenizer.from_vocabulary(description.vocabulary)
    template = ChatTemplate(description.chat_template or "")
    prompt = tokenizer.encode(template.render([ChatMessage("user", QUESTION)]), parse_special=True)
    texts = [tokenizer.encode(text, parse_special=False) for text in (ANSWER, *FOREIGN.values())]
    return [prompt + texts[0], *texts[1:]]


def logits_of(packed: PackedModel, layout: Layout, sequences: list[list[int]]) -> Float64:
    """(T, V) of all positions, as the layout's groups compute them one after the other."""
    config = ModelConfig.from_dict(packed.manifest.config)
    hidden = None
    for number, (first, end) in enumerate(layout.bounds):
        group = LayerGroup.load(
            config,
            packed.manifest,
            first,
            end,
            packed.read_shard,
            first=number == 0,
            last=number == layout.last_group,
            backend=pick_backend(),
        )
        if hidden is None:
            hidden = group.embed(np.concatenate(sequences).astype(np.int32))
        else:
            hidden = over_a_hop(hidden, layout.wire)
        batch = [SequenceSlice(group.new_cache(), 0, len(ids)) for ids in sequences]
        hidden = group.forward(hidden, batch)
    return group.logits(hidden).astype(np.float64)


def mean_kl_and_top1(logits: Float64, wanted: Float64) -> tuple[float, float]:
    ours, theirs = log_softmax(logits), log_softmax(wanted)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)  # (T,)
    return float(kl.mean()), float((ours.argmax(axis=-1) == theirs.argmax(axis=-1)).mean())


@pytest.fixture(scope="module")
def forward(packed: PackedModel, sequences: list[list[int]]) -> Forward:
    num_layers = packed.manifest.config["num_hidden_layers"]

    def run(num_groups: int, wire: Wire) -> Float64:
        layout = even_layout(packed.manifest.model_id, num_layers, num_groups, wire=wire)
        return logits_of(packed, layout, sequences)

    return run


@pytest.fixture(scope="module")
def wanted(forward: Forward) -> Float64:
    return forward(1, Wire.F32)


def test_f32_costs_nothing(forward: Forward, wanted: Float64) -> None:
    assert np.array_equal(forward(3, Wire.F32), wanted)


@pytest.mark.parametrize(
    ("wire", "max_mean_kl", "min_top1"), [(Wire.F16, 0.004, 0.96), (Wire.I8, 0.05, 0.9)]
)
def test_the_shorter_wires_cost_little(
    forward: Forward, wanted: Float64, wire: Wire, max_mean_kl: float, min_top1: float
) -> None:
    for num_groups in NUM_GROUPS:
        mean_kl, top1 = mean_kl_and_top1(forward(num_groups, wire), wanted)
        print(
            f"\n{wire}, {num_groups} groups, {len(wanted)} positions: mean KL {mean_kl:.6f}, "
            f"top-1 agreement {top1:.2%}"
        )
        assert 0 < mean_kl < max_mean_kl, num_groups
        assert top1 > min_top1, num_groups
