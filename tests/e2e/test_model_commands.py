"""What `pull`, `models`, `inspect` and `load --dry-run` say of models of many kinds."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.repacking import repacking_note
from services.loader.hub import pull_from_hub
from services.loader.hub_names import parse_hub_name
from shared.manifest import Repacking, TensorKind
from tests.fake_hub import hub_in_memory
from tests.gguf_files import TinyModel, random_blocks, write_gguf
from tests.hf_folders import hf_config, hf_weights, write_folder
from tests.processes import cellpipe
from tests.safetensors_files import write_sharded

SHAPE = TinyModel(hidden=256, inner=256, layers=2, heads=4, kv_heads=4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Q4_K and Q6_K, as a Q4_K_M file has them."""
    tensors = {
        name: (random_blocks(kind, *size), kind)
        for name, size in SHAPE.shapes().items()
        if len(size) == 2
        for kind in ("Q6_K" if "down" in name else "Q4_K",)
    }
    path = tmp_path_factory.mktemp("mixed") / "Mixed.Q4_K_M.gguf"
    return write_gguf(path, replace(SHAPE, tensors=tensors))


class Commands:
    """Commands with a cache of their own."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return cellpipe(*arguments, settings={"CELLPIPE_CACHE_DIR": str(self.cache)})

    def said(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path / "cache")


def test_inspect_and_load_say_what_repacking_cost(mixed: Path, commands: Commands) -> None:
    shown = json.loads(commands.said("inspect", str(mixed), "--json"))
    dry = json.loads(commands.said("load", str(mixed), "--dry-run", "--json"))
    person = commands.said("load", str(mixed), "--dry-run")

    told = {line["tensor"]: line for line in shown["repacked"]}
    assert told["down_proj"]["source_type"] == "Q6_K"
    assert told["down_proj"]["kind"] == "int8"
    assert 0 < told["down_proj"]["relative_rms"] < 0.01
    assert 0 < told["q_proj"]["relative_rms"] < 0.002
    assert dry["repacked"] == shown["repacked"]
    assert "repacked for the kernel: Q4_K to int4 (relative RMS 0.0" in person
    assert "Q6_K to int8 (relative RMS 0." in person
    assert "down_proj" in commands.said("inspect", str(mixed))


def test_the_note_names_the_largest_error_of_each_way() -> None:
    lines = [
        Repacking("q_proj", "Q6_K", TensorKind.INT8, 0.004),
        Repacking("v_proj", "Q6_K", TensorKind.INT8, 0.0051),
    ]

    assert "Q6_K to int8 (relative RMS 0.51 %);" in repacking_note(lines)
    assert repacking_note([]) == ""


def test_a_lossless_file_says_nothing_of_it(tmp_path: Path, commands: Commands) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    assert json.loads(commands.said("inspect", str(path), "--json"))["repacked"] == []
    assert "repacked" not in commands.said("load", str(path), "--dry-run")


def test_a_pulled_file_is_a_model_by_each_of_its_names(mixed: Path, commands: Commands) -> None:
    repo = {mixed.name: mixed.read_bytes()}
    name = f"hf:org/some-model:{mixed.name}"
    path = pull_from_hub(
        parse_hub_name(name), commands.cache, hub=hub_in_memory({"org/some-model": repo}, {})
    )

    ids = {
        json.loads(commands.said("inspect", asked, "--json"))["model_id"]
        for asked in (name, "mixed.q4_k_m", str(path))
    }
    listed = json.loads(commands.said("models", "--json"))

    (model_id,) = ids
    assert model_id.startswith("mixed.q4_k_m@")
    assert [m for m in listed if m["path"]] == [
        {"name": name, "num_bytes": path.stat().st_size, "path": str(path)}
    ]
    assert any(m["name"] == "smollm2-135m" for m in listed)
    assert "not here yet: cellpipe pull" in commands.said("models")
    assert "the file of that name makes" in commands.run("inspect", "mixed.q4_k_m@0123").stderr


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_of_the_hub_is_pulled_packed_and_asked(
    tmp_path: Path, commands: Commands, num_shards: int
) -> None:
    folder = write_folder(tmp_path / "source")
    if num_shards > 1:
        weights = list(hf_weights(hf_config()).items())
        (folder / "model.safetensors").unlink()
        write_sharded(
            folder,
            [{n: (w, "F16") for n, w in weights[i::num_shards]} for i in range(num_shards)],
        )
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = hub_in_memory({"org/Tiny-Chat": files | {"pytorch_model.bin": b"\x80\x02."}}, {})
    pulled = pull_from_hub(parse_hub_name("hf:org/Tiny-Chat"), commands.cache, hub=hub)

    dry = json.loads(commands.said("load", "hf:org/Tiny-Chat", "--dry-run", "--json"))
    name, _, _ = dry["model_id"].partition("@")
    answers = {
        commands.said("run", "-m", asked, "-t", "0", "-n", "4", "--raw", "hello")
        for asked in ("hf:org/Tiny-Chat", str(pulled), name)
    }

    assert name == "tiny-chat"
    assert {line["source_type"] for line in dry["repacked"]} == {
        "BF16" if num_shards == 1 else "F16"
    }
    assert max(line["relative_rms"] for line in dry["repacked"]) < 0.01
    assert len(answers) == 1


DAMAGE: dict[str, tuple[str, bytes | None, str]] = {
    "zip": ("model.safetensors", b"PK\x03\x04" + bytes(100), "zip archive, as torch.save writes"),
    "pickle": ("model.safetensors", b"\x80\x02}q\x00." + bytes(100), "pickle, which can run code"),
    "absurd header": ("model.safetensors", b"\xff" * 100, "its header would have"),
    "traversal": (
        "model.safetensors.index.json",
        b'{"weight_map": {"w": "../../x.safetensors"}}',
        "no file of its own",
    ),
    "no weights": ("model.safetensors", None, "has no safetensors file"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, commands: Commands, case: str
) -> None:
    file, content, named = DAMAGE[case]
    folder = write_folder(tmp_path / "damaged")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)

    result = commands.run("load", str(folder), "--dry-run")

    first, *rest = result.stderr.strip().splitlines()
    assert result.returncode == 1
    assert named in first
    assert len(rest) == 1  # the remedy
    assert not list(commands.cache.rglob("*.shard"))
