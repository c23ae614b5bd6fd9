"""Pulling from the hub: what is taken, what is refused, and going on where it broke."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.loader.hub import Hub, find_pulled, pull_from_hub, pulled_models
from services.loader.hub_names import HubFile, HubListing, HubName, parse_hub_name, text_files
from services.loader.pull import resolve_model
from shared.errors import ModelError
from shared.formats.safetensors_file import INDEX_FILE
from tests.fake_hub import COMMIT, LARGE_BYTES, FakeHub, hub_in_memory
from tests.gguf_files import write_gguf
from tests.safetensors_files import write_safetensors, write_sharded

REPO = "some-org/Tiny-1"
TEXTS = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
NOT_TAKEN = {
    "pytorch_model.bin": b"\x80\x02}q\x00.",
    "pytorch_model.bin.index.json": b"{}",
    "training_args.bin": b"\x80\x02.",
    "modeling_tiny.py": b"import os",
    "README.md": b"# Tiny",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.00.pth": b"PK\x03\x04",
    ".gitattributes": b"",
}


def weights(seed: int = 0, rows: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("one") / "model.safetensors"
    return {path.name: write_safetensors(path, {"w": (weights(), "F32")}).read_bytes()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("shards")
    write_sharded(folder, [{n: (weights(i), "F16")} for i, n in enumerate("abc")])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Nothing in it yet; the hub's client asks it and no other."""
    pytest.importorskip("huggingface_hub")
    with closing(FakeHub({})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def refused(name: str, cache: Path, hub: Hub | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        pull_from_hub(parse_hub_name(name), cache, hub=hub)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def test_a_sharded_model_is_taken_and_nothing_that_runs_code(
    hub: FakeHub, tmp_path: Path, shards: dict[str, bytes]
) -> None:
    hub.repos = {REPO: TEXTS | shards | NOT_TAKEN | {"consolidated.safetensors": b"other"}}
    seen: list[tuple[str, int, int]] = []

    folder = pull_from_hub(
        parse_hub_name(f"hf:{REPO}"), tmp_path, progress=lambda *told: seen.append(told)
    )

    assert folder.name == "Tiny-1"
    taken = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert taken == TEXTS | shards
    assert {path for path, _ in hub.served} == set(TEXTS | shards)
    name = f"hf:{REPO}"
    large = sum(len(body) for file, body in shards.items() if file != INDEX_FILE)
    assert (name, large, large) in seen
    assert [told[0] for told in seen][-1] == "verify"


def test_what_was_pulled_is_found_without_a_network(
    hub: FakeHub, tmp_path: Path, one_file: dict[str, bytes], gguf: bytes
) -> None:
    hub.repos = {REPO: TEXTS | one_file | {"q/tiny.gguf": gguf}}
    folder = resolve_model(f"hf:{REPO}", tmp_path)
    file = resolve_model(f"hf:{REPO}@v1:q/tiny.gguf", tmp_path)
    hub.close()

    assert resolve_model(f"hf:{REPO}", tmp_path) == folder
    assert resolve_model("tiny-1", tmp_path) == folder
    assert resolve_model("Tiny-1@0123456789ab", tmp_path) == folder
    assert resolve_model(f"hf:{REPO}@v1:q/tiny.gguf", tmp_path) == file
    assert resolve_model("tiny", tmp_path) == file
    assert file.read_bytes() == gguf
    assert find_pulled(parse_hub_name(f"hf:{REPO}@v2"), tmp_path) is None
    assert set(pulled_models(tmp_path).values()) == {folder, file}
    with pytest.raises(ModelError, match=f"pulled were: hf:{REPO}"):
        resolve_model("tiny-2", tmp_path)


def test_a_broken_pull_goes_on_where_it_stopped(
    hub: FakeHub, tmp_path: Path, one_file: dict[str, bytes]
) -> None:
    (file,) = one_file
    name = parse_hub_name(f"hf:{REPO}")
    hub.repos = {REPO: TEXTS | one_file}
    hub.cut = {file: [3000, 2000, *[0] * 5]}
    assert f"{file} stops at byte 5000 of {len(one_file[file])}" in refused(str(name), tmp_path)

    folder = pull_from_hub(name, tmp_path)

    starts = [start for path, start in hub.served if path == file]
    assert starts == [0, 3000, *[5000] * 6]
    assert (folder / file).read_bytes() == one_file[file]
    assert {path.name for path in folder.iterdir()} == {*TEXTS, file}


def test_whole_files_of_a_broken_pull_are_not_fetched_again(
    hub: FakeHub, tmp_path: Path, shards: dict[str, bytes]
) -> None:
    last = "model-00003-of-00003.safetensors"
    hub.repos = {REPO: TEXTS | shards}
    hub.damaged = {last: shards[last][:-1] + b"!"}
    assert "is not what the hub lists" in refused(f"hf:{REPO}", tmp_path)
    first_round = len(hub.served)
    hub.damaged = {}

    folder = pull_from_hub(parse_hub_name(f"hf:{REPO}"), tmp_path)

    assert [path for path, _ in hub.served[first_round:]] == [last]
    assert (folder / last).read_bytes() == shards[last]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("cut", [-1, 0])
def test_a_file_that_is_not_what_the_hub_lists_never_gets_in_place(
    tmp_path: Path, one_file: dict[str, bytes], file: str, cut: int
) -> None:
    files = TEXTS | one_file
    damaged = files[file][:cut] + (b"?" if cut else b"")
    hub = hub_in_memory({REPO: files}, {file: damaged})

    assert f"{file} of hf:{REPO} is not what the hub lists" in refused(f"hf:{REPO}", tmp_path, hub)
    assert find_pulled(parse_hub_name(f"hf:{REPO}"), tmp_path) is None
    assert not list(tmp_path.rglob(f"Tiny-1/{file}"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"PK\x03\x04" + bytes(LARGE_BYTES), "zip archive"),
        (b"\x80\x02}q\x00." + bytes(LARGE_BYTES), "pickle"),
        (b"\xff" * LARGE_BYTES, "its header would have"),
    ],
)
def test_what_no_reader_takes_is_refused_before_it_is_in_place(
    tmp_path: Path, content: bytes, named: str
) -> None:
    files = TEXTS | {"model.safetensors": content, "m.gguf": content}
    hub = hub_in_memory({REPO: files}, {})

    assert named in refused(f"hf:{REPO}", tmp_path, hub)
    assert refused(f"hf:{REPO}:m.gguf", tmp_path, hub)
    assert not list(tmp_path.rglob("Tiny-1"))


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../../secret.safetensors"}}
    hub = hub_in_memory({REPO: TEXTS | {INDEX_FILE: json.dumps(index).encode()}}, {})

    assert "no file of its own" in refused(f"hf:{REPO}", tmp_path, hub)


INSTEAD = {
    "hf:o/pickled": "only pytorch_model.bin: pickles, which can run code",
    "hf:o/ggufs": "GGUF files: a.gguf, b.gguf",
    "hf:o/ggufs:c.gguf": "has no c.gguf; it has a.gguf, b.gguf",
    "hf:o/lacking": "lacks model-00002-of-00003.safetensors",
    "hf:o/many": "has 2 safetensors files and no",
    "hf:o/empty": "has no weights",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_a_repository_says_what_it_has_instead(
    tmp_path: Path, shards: dict[str, bytes], gguf: bytes, name: str
) -> None:
    repos = {
        "o/pickled": TEXTS | {"pytorch_model.bin": b"\x80\x02."},
        "o/ggufs": {"b.gguf": gguf, "a.gguf": gguf},
        "o/lacking": TEXTS | {path: body for path, body in shards.items() if "00002" not in path},
        "o/many": TEXTS | {"a.safetensors": b"", "b.safetensors": b""},
        "o/empty": {"README.md": b""},
    }

    assert INSTEAD[name] in refused(name, tmp_path, hub_in_memory(repos, {}))


def test_what_the_hub_does_not_have_is_said_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos = {REPO: TEXTS}

    assert "hf:no/where cannot be had" in refused("hf:no/where", tmp_path)
    assert f"hf:{REPO}@v9 cannot be had" in refused(f"hf:{REPO}@v9", tmp_path)


def test_a_revision_that_moved_on_is_fetched_anew_when_it_is_pulled(
    hub: FakeHub, tmp_path: Path, one_file: dict[str, bytes]
) -> None:
    hub.repos = {REPO: TEXTS | one_file}
    before = resolve_model(f"hf:{REPO}", tmp_path)
    hub.commit = "d" * 40

    assert resolve_model(f"hf:{REPO}", tmp_path) == before
    after = resolve_model(f"hf:{REPO}", tmp_path, refresh=True)

    assert COMMIT in str(before)
    assert hub.commit in str(after)
    assert resolve_model(f"hf:{REPO}", tmp_path) == after


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:o/n", HubName("o", "n", "main", None)),
        ("hf:o/n@v1.0", HubName("o", "n", "v1.0", None)),
        ("hf:o/n@refs/pr/3", HubName("o", "n", "refs/pr/3", None)),
        ("hf:o/N-1.5:M.Q4_K_M.gguf", HubName("o", "N-1.5", "main", "M.Q4_K_M.gguf")),
        ("hf:o/n@v1:sub/m.gguf", HubName("o", "n", "v1", "sub/m.gguf")),
    ],
)
def test_names_are_parsed_and_told_again(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:name",
        "hf:o/n/m",
        "hf:../n",
        "hf:o/..",
        "hf:o/n@../x",
        "hf:o/n@",
        "hf:o/n:m.bin",
        "hf:o/n:../m.gguf",
        "hf:o/n:/m.gguf",
        "hf:o/n:a//m.gguf",
        "hf:o/n m",
        "hf:o/n\n",
        "hf:-o/n",
    ],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match="names no model of the hub"):
        parse_hub_name(text)


def test_text_files_are_chosen_by_name() -> None:
    names = [*TEXTS, *NOT_TAKEN, "tokenizer.model", "tiktoken.model", "kimi.tiktoken", "merges.txt"]
    listing = HubListing(COMMIT, {n: HubFile(n, 1, None, "x") for n in names})

    taken = {file.path for file in text_files(listing)}

    assert taken == {*TEXTS, "tokenizer.model", "tiktoken.model", "kimi.tiktoken", "merges.txt"}


def test_a_path_like_a_repository_says_how_the_hub_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no file some/model") as caught:
        resolve_model("some/model", tmp_path)

    assert "hf:some/model" in caught.value.remedy
