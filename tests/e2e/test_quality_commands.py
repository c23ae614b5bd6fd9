"""`cellpipe evaluate` and `quantize` as a person or a script meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gguf_files import TinyModel, write_gguf
from tests.processes import cellpipe

TEXT = "hello world, here is a text; " * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a file of 4 bits made of it, and a text."""
    folder = tmp_path_factory.mktemp("quality")
    model = TinyModel(matrix_type="F16", embedding_type="F16")
    write_gguf(folder / "source.gguf", model)
    (folder / "text.txt").write_text(TEXT)
    (folder / "short.txt").write_text("hello")
    made = run(folder, "quantize", "source.gguf", "int4.gguf", "--calibrate", "text.txt", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["bits_per_weight"] < 6
    return folder


def run(folder: Path, *args: str):  # type: ignore[no-untyped-def]
    return cellpipe(*args, settings={"CELLPIPE_CACHE_DIR": str(folder / "cache")}, cwd=folder)


def test_evaluate_gives_perplexity_and_the_distance_from_a_reference(folder: Path) -> None:
    options = ["--text", "text.txt", "--window", "64", "--html", "report.html", "--json"]

    result = run(folder, "evaluate", "int4.gguf", "--reference", "source.gguf", *options)

    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["perplexity"] > 1
    assert report["num_scored"] == report["num_windows"] * 31
    assert report["divergence"]["mean_kl"] > 0
    assert 0 < report["divergence"]["top1_agreement"] <= 1
    assert len(report["layers"]) == 2
    assert report["memory"]["num_parameters"] > 0
    page = (folder / "report.html").read_text()
    assert f"{report['perplexity']:.4f}" in page
    assert ("<svg" in page) != ("matplotlib was not installed" in page)
    assert ("matplotlib is not installed" in result.stderr) == ("<svg" not in page)


def test_evaluate_draws_tables_for_people(folder: Path) -> None:
    result = run(folder, "evaluate", "source.gguf", "--text", "text.txt", "--window", "64")

    assert result.returncode == 0, result.stderr
    assert "perplexity" in result.stdout
    assert "layers in 256 MiB" in result.stdout
    assert "KL" not in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--text", "short.txt", "--window", "64"], 1, "fewer than one window of 64"),
        (["--window", "512"], 2, "--window 512 is longer than the model's context of 128"),
        (["--window", "2"], 2, "--window must be at least 8 tokens, got 2"),
        (["--text", "missing.txt"], 2, "--text missing.txt cannot be read"),
        (["--text", "source.gguf"], 2, "--text source.gguf is not UTF-8"),
        (["--cluster"], 2, "CELLPIPE_AMQP_URL"),
        (["--cluster", "--reference", "int4.gguf"], 2, "--reference needs the whole"),
        (["--cluster", "--arithmetic", "float"], 2, "--arithmetic float is computed in this"),
        (["--cluster", "--threads", "2"], 2, "--threads 2 is for this process"),
        (["--html", "nowhere/report.html"], 2, "there is no folder nowhere"),
        (["--html", "."], 2, "--html . is a folder"),
        (["--reference", "missing.gguf"], 1, "there is no file missing.gguf"),
    ],
)
def test_evaluate_refuses_by_name(folder: Path, args: list[str], code: int, message: str) -> None:
    result = run(folder, "evaluate", "source.gguf", "--text", "text.txt", *args)

    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["source.gguf", "int4.gguf"], 2, "int4.gguf is there already"),
        (["source.gguf", "source.gguf"], 2, "source.gguf is the model itself"),
        (["source.gguf", "made.bin"], 2, "the output must be called"),
        (["source.gguf", "nowhere/made.gguf"], 2, "there is no folder nowhere"),
        (["source.gguf", "made.gguf", "--method", "best"], 2, "--method must be one of"),
        (["source.gguf", "made.gguf", "--bits", "3"], 2, "--bits must be 4 or 8, got 3"),
        (["missing.gguf", "made.gguf"], 1, "there is no file missing.gguf"),
    ],
)
def test_quantize_refuses_by_name(folder: Path, args: list[str], code: int, message: str) -> None:
    result = run(folder, "quantize", *args)

    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "made.gguf").exists()


def test_quantize_tells_what_each_unit_got(folder: Path) -> None:
    result = run(folder, "quantize", "source.gguf", "told.gguf", "--bits", "8")

    assert result.returncode == 0, result.stderr
    assert "embedding and head" in result.stdout
    assert "Q8_0" in result.stdout
