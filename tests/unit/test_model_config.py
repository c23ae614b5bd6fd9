"""The options of a model config: their forms, what contradicts, and the rope tables they make."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from shared.errors import ModelError
from shared.formats.hf_config import read_hf_config
from shared.model.config import ModelConfig
from shared.model.rope import RopeScaling
from tests.hf_folders import hf_config
from tests.tiny_model import tiny_config

OPTIONS: dict[str, Any] = {
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "qk_norm": True,
    "post_norms": True,
    "embedding_scale": 8.0,
    "attention_scale": 0.25,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
    "sliding_window": 24,
    "sliding_layers": (0, 2),
    "local_rope_theta": 100.0,
    "rope_free_layers": (1,),
    "rope_dim": 8,
    "rope_scaling": RopeScaling("longrope", 2.0, 64, short_factors=(1.0, 2.0, 3.0, 4.0)),
}
# Frequencies and the factor on cos and sin as transformers has them, of 8 pairs and base 10,000.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
FREQUENCIES: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "linear": (
        {"rope_type": "linear", "factor": 8.0},
        [0.125, 0.03952847, 0.0125, 0.003952847, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        [1.0, 0.3162278, 0.1, 0.03162278, 0.003086761, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    "yarn": (
        YARN,
        [1.0, 0.3162278, 0.1, 0.02569351, 0.00625, 0.001383497, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    "yarn, all said": (
        {
            **YARN,
            "factor": 16.0,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        [1.0, 0.3162278, 0.1, 0.02308819, 0.002613625, 0.0001976424, 6.25e-05, 1.976424e-05],
        0.8777191591153677,
    ),
}


@pytest.mark.parametrize("case", FREQUENCIES)
def test_scaled_rope_turns_as_transformers_has_it(case: str) -> None:
    parameters, frequencies, length = FREQUENCIES[case]
    config = read_hf_config(
        hf_config(rope_scaling=parameters, max_position_embeddings=8192), "config.json"
    )

    tables = config.rope_tables(range(3, 4))

    angles = np.arctan2(tables["sin"][0], tables["cos"][0])
    np.testing.assert_allclose(angles, 3 * np.array(frequencies), rtol=1e-5)
    np.testing.assert_allclose(np.hypot(tables["sin"], tables["cos"]), length, rtol=1e-6)


@pytest.mark.parametrize(("num_positions", "factor"), [(64, 2.0), (65, 5.0)])
def test_longrope_takes_its_long_factors_for_long_tables(num_positions: int, factor: float) -> None:
    scaling = RopeScaling("longrope", 2.0, 64, short_factors=(2.0,) * 8, long_factors=(5.0,) * 8)
    plain = tiny_config(max_position_embeddings=num_positions)
    scaled = tiny_config(max_position_embeddings=num_positions, rope_scaling=scaling)

    got, base = (np.arcsin(c.rope_tables(range(1, 2))["sin"]) for c in (scaled, plain))

    np.testing.assert_allclose(got, base / factor, rtol=1e-5)


def test_pairs_behind_the_rope_dimensions_stand_still() -> None:
    tables = tiny_config(rope_dim=6, max_position_embeddings=9).rope_tables()

    assert (tables["cos"][:, 3:] == 1).all()
    assert (tables["sin"][:, 3:] == 0).all()
    exponents = np.arange(0, 6, 2) / 6
    angles = 8 * 10_000.0**-exponents
    np.testing.assert_allclose(tables["cos"][8, :3], np.cos(angles), rtol=1e-6)


def test_rows_of_tables_are_those_of_the_whole() -> None:
    config = tiny_config(local_rope_theta=50.0, sliding_window=4, sliding_layers=(1,))
    whole, part = config.rope_tables(), config.rope_tables(range(7, 20))

    assert list(whole) == ["cos", "sin", "local_cos", "local_sin"]
    for name, table in part.items():
        np.testing.assert_array_equal(table, whole[name][7:20])
    assert [config.rope_of(layer) for layer in range(3)] == ["", "local_", ""]


def test_a_config_without_options_has_the_form_of_before_there_were_any() -> None:
    config = tiny_config()

    assert not set(OPTIONS) & set(config.to_dict())
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_options_survive_json() -> None:
    config = tiny_config(**OPTIONS)

    raw = json.loads(json.dumps(config.to_dict()))

    assert set(OPTIONS) < set(raw)
    assert ModelConfig.from_dict(raw) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": "relu"}, "activation must be silu or gelu_tanh, got 'relu'"),
        ({"sliding_layers": (1,)}, "sliding_window is missing"),
        ({"sliding_layers": (1, 0), "sliding_window": 4}, "sliding_layers must be layers in asc"),
        ({"rope_free_layers": (4,)}, "rope_free_layers must be layers"),
        ({"sliding_window": 0}, "sliding_window must be in 1..2147483647, got 0"),
        ({"rope_dim": 18}, "rope_dim must be even and at most head_dim 16, got 18"),
        ({"logit_softcap": -1.0}, "logit_softcap must be positive and finite, got -1.0"),
        ({"attention_scale": math.inf}, "attention_scale must be positive and finite"),
        (
            {"rope_scaling": RopeScaling("factors", short_factors=(1.0,))},
            "1 entries, a head has 8 pairs",
        ),
    ],
)
def test_options_that_contradict_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"kind": "ntk"}, "'ntk' is not one of linear"),
        ({"kind": "yarn", "factor": 4.0}, "original_max_position_embeddings must be a positive"),
        ({"kind": "linear", "factor": math.nan}, "factor must lie in 1e-06..1e[+]09, got nan"),
        ({"kind": "factors"}, "its factors are missing"),
        ({"kind": "linear", "speed": 1}, "unknown keys in the rope scaling: speed"),
        ({"factor": 1.0}, "missing"),
        (
            {
                "kind": "llama3",
                "original_max_position_embeddings": 9,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            },
            "high_freq_factor 4.0 is not above",
        ),
    ],
)
def test_rope_scaling_that_cannot_be_is_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        RopeScaling.from_dict(raw)
