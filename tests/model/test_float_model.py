"""Facts about the forward pass without quantisation: it is that of transformers, architecture by
architecture, and it does not matter how a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

from shared.formats.architectures import ARCHITECTURES
from shared.formats.hf_config import architecture_of, read_hf_config
from shared.formats.placement import places
from shared.model.float_model import FloatModel
from tests.model.tiny_oracles import VARIANTS, Oracle, make_oracle, prompt

pytestmark = pytest.mark.oracle
NUM_TOKENS = 75


def float_model(oracle: Oracle) -> FloatModel:
    config = read_hf_config(oracle.config, "config.json")
    where = places(architecture_of(oracle.config, "config.json"), config, "hf")
    weights = oracle.weights()

    def read(key: str) -> np.ndarray:
        place = where[key]
        values = weights[place.source]
        assert values.shape == place.source_shape
        values = values.reshape(-1, place.cols)[place.first_row : place.first_row + place.rows]
        if place.order is not None:
            values = values.reshape(place.order.shape + (-1,))[place.order].reshape(values.shape)
        return values + np.float32(place.offset)

    return FloatModel(config, read)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str) -> None:
    oracle = make_oracle(variant)
    model = float_model(oracle)
    tokens = prompt(NUM_TOKENS)
    want = oracle.logits(tokens)

    cache = model.new_cache()
    pieces = [model.logits(tokens[:50], cache)]
    pieces += [model.logits(tokens[at : at + 1], cache) for at in range(50, NUM_TOKENS)]
    got = np.concatenate(pieces)

    assert np.abs(want).max() > 1
    assert np.abs(got - want).max() < 1e-4


def test_every_architecture_has_a_variant() -> None:
    classes = {make_oracle(variant).config["architectures"][0] for variant in VARIANTS}

    assert classes == {architecture.hf_class for architecture in ARCHITECTURES}
