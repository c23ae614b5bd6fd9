"""From a file with many bits to one with few, whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.loader.packed import open_packed
from services.quality.evaluate import evaluate
from services.quality.quantize import QuantizeOptions, QuantizeReport, quantize_file
from services.quality.stages import FloatStages
from services.quality.tensors import Method
from services.quality.windows import cut_windows
from shared.errors import ConfigError, ModelError, RequestError
from shared.formats.gguf import read_gguf
from shared.formats.gguf_file import open_gguf
from shared.text.tokenizer import Tokenizer
from tests.full_disk import full_disk
from tests.gguf_files import TinyModel, write_gguf


def small_logits(hidden: int) -> dict[str, tuple[np.ndarray, str]]:
    """A final norm that keeps a random model from being sure of anything: losses stay small."""
    return {"output_norm.weight": (np.full(hidden, 0.2, np.float32), "F32")}


SOURCE = TinyModel(
    matrix_type="F16",
    embedding_type="F16",
    layers=4,
    hidden=96,
    inner=160,
    heads=6,
    tensors=small_logits(96),
)
TEXT = "".join(chr(97 + number % 23) + " hello world"[: number % 9] for number in range(900))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "source.gguf", SOURCE)


def quantize(source: Path, target: Path, **options: object) -> QuantizeReport:
    values = {"bits": 4, "method": Method.SEARCH, "calibration_windows": 6} | options
    return quantize_file(
        source,
        target,
        QuantizeOptions(**values),  # type: ignore[arg-type]
        progress=lambda stage, done, total: None,
    )


def types_in(path: Path) -> dict[str, str]:
    return {name: tensor.type_name for name, tensor in open_gguf(path).tensors.items()}


def loss_of(path: Path, source: Path) -> float:
    """Mean KL of a file's own numbers from the source's, both in binary32."""
    ours, theirs = read_gguf(path), read_gguf(source)
    tokenizer = Tokenizer.from_vocabulary(theirs.vocabulary)
    found = evaluate(
        FloatStages(ours.config, ours.tensors),
        cut_windows(TEXT[::-1], tokenizer, window=128, max_windows=4),
        reference=FloatStages(theirs.config, theirs.tensors),
    )
    assert found.divergence is not None
    return found.divergence.mean_kl


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": Method.SYMMETRIC}, "Q4_0"),
        ({"method": Method.RANGE}, "Q4_1"),
        ({"method": Method.SEARCH}, "Q4_1"),
        ({"method": Method.SEARCH, "calibration": TEXT}, "Q4_1"),
        ({"bits": 8, "method": Method.SYMMETRIC}, "Q8_0"),
        ({"bits": 8, "method": Method.SEARCH, "calibration": TEXT}, "Q8_0"),
    ],
)
def test_every_matrix_gets_the_methods_type_and_norms_stay(
    source: Path, tmp_path: Path, options: dict[str, object], expected: str
) -> None:
    report = quantize(source, tmp_path / "made.gguf", **options)

    kinds = types_in(tmp_path / "made.gguf")
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {expected}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    made = open_gguf(tmp_path / "made.gguf")
    assert report.num_bytes == sum(tensor.num_bytes for tensor in made.tensors.values())
    assert report.num_weights == sum(t.num_rows * t.num_cols for t in made.tensors.values())
    assert all(0 < unit.relative_error < 0.2 for unit in report.units)


def test_the_kernel_packs_what_was_written_without_loss(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "made.gguf", calibration=TEXT)

    packed = open_packed(tmp_path / "made.gguf", tmp_path / "cache")

    assert packed.manifest.config == open_packed(source, tmp_path / "cache").manifest.config
    views = read_gguf(tmp_path / "made.gguf").tensors.values()
    assert all(view.is_lossless for view in views)


def test_each_method_loses_less_than_the_one_before(source: Path, tmp_path: Path) -> None:
    losses = []
    for number, options in enumerate(
        [
            {"method": Method.SYMMETRIC},
            {"method": Method.RANGE},
            {"method": Method.SEARCH},
            {"method": Method.SEARCH, "calibration": TEXT},
            {"bits": 8, "method": Method.SYMMETRIC},
            {"bits": 8, "method": Method.SEARCH, "calibration": TEXT},
        ]
    ):
        quantize(source, tmp_path / f"{number}.gguf", **options)
        losses.append(loss_of(tmp_path / f"{number}.gguf", source))

    assert losses == sorted(losses, reverse=True)
    # Of random weights, whose inputs hardly go together; a real model's do, which gains more.
    assert losses[3] < 0.6 * losses[0]
    assert losses[4] < losses[0] / 100


def test_a_budget_is_kept_and_used(source: Path, tmp_path: Path) -> None:
    losses = []
    for bits in (5.0, 6.0, 8.0):
        report = quantize(
            source, tmp_path / "made.gguf", calibration=TEXT, max_bits_per_weight=bits
        )
        made = open_gguf(tmp_path / "made.gguf")
        num_bytes = sum(tensor.num_bytes for tensor in made.tensors.values())
        assert 8 * num_bytes / report.num_weights == report.bits_per_weight <= bits
        assert all(unit.expected_loss is not None for unit in report.units)
        losses.append(loss_of(tmp_path / "made.gguf", source))
        (tmp_path / "made.gguf").unlink()

    assert losses == sorted(losses, reverse=True)


def test_first_and_last_layer_and_head_are_units_of_their_own(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "made.gguf", calibration=TEXT, max_bits_per_weight=6.5)

    names = {unit.name for unit in report.units}
    assert {"first layer", "last layer", "embedding and head", "down_proj, other layers"} <= names
    kinds = types_in(tmp_path / "made.gguf")
    for unit, tensors in {
        "first layer": ["blk.0.attn_q.weight", "blk.0.ffn_down.weight"],
        "last layer": ["blk.3.attn_v.weight"],
        "embedding and head": ["token_embd.weight"],
        "down_proj, other layers": ["blk.1.ffn_down.weight", "blk.2.ffn_down.weight"],
    }.items():
        (expected,) = {u.type_name for u in report.units if u.name == unit}
        assert {kinds[name] for name in tensors} == {expected}


def test_an_untied_head_is_calibrated_and_the_embedding_is_not_in_the_way(tmp_path: Path) -> None:
    model = TinyModel(matrix_type="F16", embedding_type="F16", tied=False, tensors=small_logits(64))
    source = write_gguf(tmp_path / "source.gguf", model)

    report = quantize(source, tmp_path / "made.gguf", calibration=TEXT, max_bits_per_weight=6.5)

    assert {"embedding", "head"} <= {unit.name for unit in report.units}
    assert loss_of(tmp_path / "made.gguf", source) < 0.05


def test_equal_input_gives_equal_files_on_any_number_of_threads(
    source: Path, tmp_path: Path
) -> None:
    for name, threads in (("one", 1), ("two", 1), ("three", 3)):
        quantize(
            source,
            tmp_path / f"{name}.gguf",
            calibration=TEXT,
            calibration_windows=2,
            num_threads=threads,
        )

    contents = {(tmp_path / f"{name}.gguf").read_bytes() for name in ("one", "two", "three")}
    assert len(contents) == 1


def test_a_source_of_few_bits_is_told_of(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", TinyModel())

    report = quantize(source, tmp_path / "made.gguf", method=Method.SYMMETRIC)

    assert report.already_quantized == ("Q4_1",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "--bits must be 4 or 8, got 5"),
        ({"bits": 8, "method": Method.RANGE}, "--method range is for --bits 4"),
        ({"max_bits_per_weight": 4.75}, "--max-bits-per-weight chooses types by the loss"),
        ({"max_bits_per_weight": -1.0, "calibration": "x"}, "must be positive and finite, got -1"),
        ({"max_bits_per_weight": float("inf"), "calibration": "x"}, "and finite, got inf"),
        ({"method": Method.RANGE, "calibration": "x"}, "--calibrate changes nothing"),
        ({"method": Method.RANGE, "calibration": ""}, "--calibrate changes nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    values = {"bits": 4, "method": Method.SEARCH} | options

    with pytest.raises(ConfigError, match=message):
        QuantizeOptions(**values)  # type: ignore[arg-type]


def test_a_budget_below_the_smallest_types_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the smallest types take"):
        quantize(source, tmp_path / "made.gguf", calibration=TEXT, max_bits_per_weight=4.0)
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize("text", ["too short", ""])
def test_a_calibration_text_that_fills_no_window_is_refused(
    source: Path, tmp_path: Path, text: str
) -> None:
    with pytest.raises(RequestError, match="fewer than one window of 128"):
        quantize(source, tmp_path / "made.gguf", calibration=text)


@pytest.mark.parametrize("num_bytes", [1000, 40_000])
def test_a_full_disk_is_told_of_and_leaves_nothing(
    source: Path, tmp_path: Path, num_bytes: int
) -> None:
    with (
        full_disk(num_bytes),
        pytest.raises(ModelError, match=r"made\.gguf cannot be written: (?!None)"),
    ):
        quantize(source, tmp_path / "made.gguf")

    assert list(tmp_path.iterdir()) == []


def test_two_do_not_write_the_same_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made.gguf"
    refusals: list[ConfigError] = []

    def meanwhile(stage: str, done: int, total: int) -> None:
        if not refusals:
            with pytest.raises(ConfigError, match="being written by another process") as caught:
                quantize(source, target)
            refusals.append(caught.value)

    options = QuantizeOptions(bits=4, method=Method.SEARCH)
    quantize_file(source, target, options, progress=meanwhile)

    assert refusals
    assert open_gguf(target).tensors
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_known_of_before_work(
    source: Path, tmp_path: Path
) -> None:
    def work(stage: str, done: int, total: int) -> None:
        raise AssertionError("nothing is to be computed")

    options = QuantizeOptions(bits=4, method=Method.SEARCH)
    with pytest.raises(ModelError, match=r"made\.gguf cannot be written: No such file"):
        quantize_file(source, tmp_path / "away" / "made.gguf", options, progress=work)


def test_the_file_says_how_it_was_made(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "made.gguf", calibration=TEXT, calibration_name="book.txt")

    told = open_gguf(tmp_path / "made.gguf").metadata["cellpipe.quantization"]
    assert told == "int4, search, calibrated on book.txt"


def test_numbers_that_are_not_finite_end_it(tmp_path: Path) -> None:
    bad = np.zeros((96, 64), np.float16)
    bad[5, 7] = np.nan
    model = TinyModel(
        matrix_type="F16", embedding_type="F16", tensors={"blk.0.ffn_up.weight": (bad, "F16")}
    )
    source = write_gguf(tmp_path / "source.gguf", model)

    with pytest.raises(ModelError, match=r"ffn_up\.weight holds NaN"):
        quantize(source, tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


def test_a_weight_beyond_fp16_is_named_by_its_tensor(tmp_path: Path) -> None:
    huge = np.zeros((96, 64), np.float32)
    huge[5, 7] = 3e7
    model = TinyModel(
        matrix_type="F16", embedding_type="F16", tensors={"blk.0.ffn_up.weight": (huge, "F32")}
    )
    source = write_gguf(tmp_path / "source.gguf", model)

    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight, rows from 0: .* row 5"):
        quantize(source, tmp_path / "made.gguf")
