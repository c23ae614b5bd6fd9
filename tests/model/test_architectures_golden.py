"""Every architecture beside what transformers said of it, which need not be installed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shared.formats.architectures import ARCHITECTURES
from shared.formats.hf_config import architecture_of, read_hf_config
from shared.formats.placement import Place, places
from shared.model.float_model import FloatModel
from tests.model.tiny_oracles import (
    GGUF_VARIANTS,
    GOLDEN,
    GOLDEN_LOGITS,
    GOLDEN_POSITIONS,
    VARIANTS,
    golden_prompt,
    make_oracle,
    random_weights,
)

golden = json.loads(GOLDEN.read_text())


def golden_model(variant: str) -> FloatModel:
    raw = golden[variant]["config"]
    config = read_hf_config(raw, "config.json")
    where = places(architecture_of(raw, "config.json"), config, "hf")
    shapes = {place.source: place.source_shape for place in where.values()}
    weights = random_weights(shapes, raw["model_type"])

    def read(key: str) -> np.ndarray:
        place: Place = where[key]
        values = weights[place.source].reshape(-1, place.cols)
        rows = values[place.first_row : place.first_row + place.rows]
        return (rows if place.order is None else rows[place.order]) + np.float32(place.offset)

    return FloatModel(config, read)


@pytest.mark.parametrize("variant", golden)
def test_logits_are_those_that_transformers_gave(variant: str) -> None:
    model = golden_model(variant)

    logits = model.logits(golden_prompt(), model.new_cache())

    got = logits[GOLDEN_POSITIONS, :GOLDEN_LOGITS]
    np.testing.assert_allclose(got, golden[variant]["logits"], atol=2e-4, rtol=0)


def test_every_variant_and_every_architecture_is_golden() -> None:
    classes = {line["config"]["architectures"][0] for line in golden.values()}

    assert set(golden) == set(VARIANTS | GGUF_VARIANTS)
    assert classes == {architecture.hf_class for architecture in ARCHITECTURES}


@pytest.mark.oracle
@pytest.mark.parametrize("variant", golden)
def test_the_golden_logits_are_still_those_of_transformers(variant: str) -> None:
    oracle = make_oracle(variant)

    logits = oracle.logits(golden_prompt())[GOLDEN_POSITIONS, :GOLDEN_LOGITS]

    assert math.isclose(0, np.abs(logits - golden[variant]["logits"]).max(), abs_tol=1e-4)
