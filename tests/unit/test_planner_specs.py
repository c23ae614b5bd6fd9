"""Reading of specs: what is bundled has sources, and users' files are read strictly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.planner.library import Library, builtin_library
from services.planner.specs import ModelSpec, NetworkSpec, NodeSpec, ServerSpec
from shared.errors import ConfigError

HARDWARE = {"ps3", "rpi5", "old-pc", "mini-pc", "m4-mini", "a100"}
MODELS = {
    "smollm2-135m", "llama-3.1-8b", "llama-3.3-70b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2",
    "kimi-k3",
}  # fmt: skip


@pytest.fixture
def library() -> Library:
    return builtin_library()


def test_everything_that_is_promised_is_there(library: Library) -> None:
    assert set(library.nodes) >= HARDWARE
    assert set(library.models) == MODELS
    assert {"gigabit", "datacenter", "article"} <= set(library.networks)


def test_every_number_has_a_source_and_every_assumption_a_reason(library: Library) -> None:
    specs: list[ModelSpec | NodeSpec | NetworkSpec | ServerSpec] = [
        *library.models.values(), *library.nodes.values(), *library.networks.values(),
        *library.servers.values(),
    ]  # fmt: skip
    for spec in specs:
        fields = {f.name for f in dataclasses.fields(spec)} - {"sources", "unsure", "name", "title"}
        assert "*" in spec.sources or fields <= set(spec.sources), spec.name
        for name in (*spec.sources, *spec.unsure):
            known = name.split(".")[0] in fields | {"*", "mlp", "attention"}
            assert known, f"{spec.name}: {name} is no field"
        if spec.sources.get("*") == "see unsure":
            default = fields - set(spec.sources)
            optional = {
                "host_cores",
                "hop_cpu_s",
                "request_cpu_s",
                "prompt_speedup",
                "local_store_bytes",
            }
            assert default - set(spec.unsure) <= optional, spec.name


def test_a_mixed_pool_is_parsed(library: Library) -> None:
    pool = library.parse_pool("ps3:100000, rpi5:12,ps3:5")

    assert {kind.node.name: kind.count for kind in pool.nodes} == {"ps3": 100_005, "rpi5": 12}
    assert pool.network.name == "datacenter"
    assert library.parse_pool("rpi5:4").network.name == "gigabit"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ps3", "--pool must be such as ps3:100000,rpi5:12 or a .toml file, got 'ps3'"),
        ("ps3:0", "got 'ps3:0'"),
        ("ps3:-1", "got 'ps3:-1'"),
        ("ps3:many", "got 'ps3:many'"),
        (":5", "got ':5'"),
        ("", "got ''"),
        ("ps4:3", "no hardware 'ps4' is known; there is a100, m4-mini"),
        ("ps3:999999999999", "a pool has 1 to 100,000,000 nodes"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_piece(library: Library, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        library.parse_pool(text)

    assert why in str(error.value)


GOOD = """
[hardware.laptop]
memory_bytes = 8e9
memory_bytes_per_s = 30e9
multiply_adds_per_s = 400e9
network_bytes_per_s = 125e6
watts = 45

[network.attic]
tiers = [{ name = "hub", size = 0, latency_s = 1e-4, uplink_bytes_per_s = 125e6 }]

[pool]
network = "attic"
nodes = [{ hardware = "laptop", count = 3 }, { hardware = "rpi5", count = 2 }]
"""


def test_a_users_file_adds_hardware_networks_and_a_pool(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "attic.toml"
    file.write_text(GOOD)

    pool = library.parse_pool(str(file))

    assert [(kind.node.name, kind.count) for kind in pool.nodes] == [("laptop", 3), ("rpi5", 2)]
    assert pool.network.name == "attic"
    assert pool.watts == 3 * 45 + 2 * 9


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("watts = 45", "", "hardware.laptop.watts is missing"),
        ("watts = 45", "watts = -1", "hardware.laptop.watts must be 0 or more, got -1"),
        ("watts = 45", "watts = nan", "hardware.laptop.watts must be 0 or more, got nan"),
        ("watts = 45", "watts = 1e308", "watts must be at most 1e+18, got 1e+308"),
        ("watts = 45", "watts = 45\nfailures_per_hour = 1e30", "must be in 0..3600, got 1e+30"),
        ("memory_bytes_per_s = 30e9", "memory_bytes_per_s = 1e-300", "at least 1e-18, got 1e-300"),
        ("memory_bytes = 8e9", "memory_bytes = 1e30", "must be at most 1e+18, got 1e+30"),
        ("watts = 45", "watts = true", "hardware.laptop.watts must be a number, got True"),
        ("watts = 45", "watts = 45\nwats = 1", "hardware.laptop.wats is not known, got 1"),
        ("memory_bytes = 8e9", 'memory_bytes = "8 GB"', "must be a whole number, got '8 GB'"),
        ("memory_bytes = 8e9", "memory_bytes = 0.5", "must be a whole number, got 0.5"),
        ("memory_bytes = 8e9", "memory_bytes = inf", "must be a whole number, got inf"),
        ("memory_bytes = 8e9", "memory_bytes = 1000", "reserved_bytes must be less than memory"),
        ("size = 0", "size = 5", "size must be 0 (any number) for the last tier"),
        ('network = "attic"', 'network = "cellar"', "pool.network must be one of"),
        ('"laptop", count', '"desktop", count', "pool.nodes[0].hardware must be one of"),
        ("count = 3", "count = 0", "pool.nodes[0].count must be at least 1, got 0"),
        ("[pool]", "[pools]", "pools is not known"),
        ("[pool]", "[pool", "is no TOML"),
    ],
)
def test_an_error_names_file_field_and_value(
    library: Library, tmp_path: Path, old: str, new: str, why: str
) -> None:
    assert old in GOOD
    file = tmp_path / "attic.toml"
    file.write_text(GOOD.replace(old, new, 1))

    with pytest.raises(ConfigError) as error:
        library.add_file(file)

    assert str(file) in str(error.value)
    assert why in str(error.value)


MODEL = """
[model.mine]
vocab_size = 1000
hidden_size = 64
max_position_embeddings = 128
layers = [{ of = ["full+dense"], times = 2 }]
attention.full = { kind = "gqa", num_attention_heads = 4, num_key_value_heads = 2, head_dim = 16 }
mlp.dense = { kind = "dense", intermediate_size = 96 }
published = { total_parameters = 1e5, active_parameters = 1e5 }
"""


def test_a_users_model_is_read(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MODEL)

    library.add_file(file)

    assert library.model("mine").num_hidden_layers == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("hidden_size = 64", "hidden_size = 65", "hidden_size must be a multiple of 32, got 65"),
        ('"full+dense"', '"full+sparse"', "must name an attention and an mlp of this file"),
        ('"gqa"', '"mamba"', "attention.full.kind must be gqa, mla or kda, got 'mamba'"),
        ("heads = 4", "heads = 3", "must be a multiple of num_key_value_heads 2, got 3"),
        ("times = 2", "times = 99999", "layers must be at most 10000"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    library: Library, tmp_path: Path, old: str, new: str, why: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MODEL.replace(old, new, 1))

    with pytest.raises(ConfigError) as error:
        library.add_file(file)

    assert why in str(error.value)
