"""The statistics of `cellpipe bench cluster`, from values with known answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from services.bench.hops import HopSums, hops_between, hops_of, sums_by_group
from services.bench.latency import LoadFigures, RawFigures, Stream, figures_of, median_of
from services.bench.llama_cluster import open_llama_peer, read_events
from services.bench.options import (
    ClusterFigures,
    ClusterOptions,
    LayoutFigures,
    PeerFigures,
    PointFigures,
)
from services.bench.plot import check_plot, draw
from services.bench.report import beyond_ms, plot_lines, to_dict, to_lines
from services.cli.settings import numbers
from shared.errors import ConfigError
from shared.store.presence_types import STAGES, WorkerInfo
from shared.topology import Wire


def stream(submitted_s: float, *arrivals_s: float, num_tokens: int | None = None) -> Stream:
    return Stream(submitted_s, arrivals_s, num_tokens or len(arrivals_s))


def stages(**us: int) -> tuple[int, ...]:
    return tuple(us.get(name, 0) for name in STAGES)


def test_throughput_is_all_tokens_from_the_first_start_to_the_last_token() -> None:
    figures = figures_of([stream(10.0, 10.5, 11.0, 11.5), stream(10.5, 11.5, 13.5, 14.0)])

    assert figures.tokens_per_s == pytest.approx(6 / 4.0)
    assert (figures.first_p50_ms, figures.first_p95_ms) == pytest.approx((500.0, 1000.0))
    assert (figures.next_p50_ms, figures.next_p95_ms) == pytest.approx((500.0, 2000.0))
    assert figures.gap_ms == pytest.approx((1.0 + 2.5) / 4 * 1e3)


def test_tokens_that_come_together_count_each_but_make_one_gap() -> None:
    figures = figures_of([stream(0.0, 1.0, 2.0, 4.0, num_tokens=7)])

    assert figures.tokens_per_s == pytest.approx(7 / 4.0)
    assert figures.gap_ms == pytest.approx(3.0 / 6 * 1e3)


def test_one_token_has_no_time_between_tokens() -> None:
    with pytest.raises(ValueError, match="second token"):
        figures_of([stream(0.0, 1.0, 2.0), stream(0.0, 1.0)])


def test_medians_are_taken_figure_by_figure() -> None:
    rounds = [
        LoadFigures(10, 1, 2, 3, 4, 5),
        LoadFigures(30, 9, 1, 2, 6, 6),
        LoadFigures(20, 2, 3, 1, 5, 4),
    ]

    assert median_of(rounds) == LoadFigures(20, 2, 2, 2, 5, 5)


def test_hops_are_means_of_what_workers_of_a_group_computed_meanwhile() -> None:
    before = sums_by_group(
        [
            WorkerInfo("a", (0,), num_decode_steps=10, num_decode_turns=10,
                       stage_us=stages(compute=1_000)),
            WorkerInfo("b", (1,), stage_us=stages()),
        ], 2,
    )  # fmt: skip
    after = sums_by_group(
        [
            WorkerInfo("a", (0,), num_decode_steps=14, num_decode_turns=12,
                       stage_us=stages(compute=9_000, redis=4_000)),
            WorkerInfo("b", (1,), num_decode_steps=1, num_decode_turns=1,
                       stage_us=stages(compute=1_000)),
            WorkerInfo("c", (1,), num_decode_steps=3, num_decode_turns=3,
                       stage_us=stages(broker=4_000, redis=2_000, settle=9_000)),
        ], 2,
    )  # fmt: skip

    first, last = hops_of(hops_between(before, after))

    assert (first.stage_ms["compute"], first.batch) == (2.0, 2.0)
    assert first.on_the_way_ms == 2.0  # its rows are stored beside the way
    assert last.stage_ms["broker"] == 1.0
    assert last.on_the_way_ms == pytest.approx(0.25 + 1.0 + 0.5)  # settling is not on it


def test_a_group_that_computed_nothing_has_no_hop() -> None:
    assert [hop.group for hop in hops_of([HopSums(), HopSums(2, 1, stages(compute=4_000))])] == [1]


@pytest.fixture
def figures() -> ClusterFigures:
    options = ClusterOptions(
        "tiny", num_groups=(1, 2), concurrency=(1, 4), wire=Wire.I8, log_folder=Path("logs")
    )

    def point(groups: int, streams: int, rate: float) -> PointFigures:
        hops = hops_of([HopSums(4, 2, stages(compute=8_000, redis=400))] * groups)
        peer = PeerFigures(LoadFigures(50, 1, 2, 3, 4, 3), rate / 50)
        load = LoadFigures(rate, 5, 6, 7, 8, 7)
        return PointFigures(groups, streams, load, hops, 2.1 * groups, 7.0, peer)

    raw = RawFigures(0.2, 0.4)
    layouts = [
        LayoutFigures(1, raw, raw, raw, raw, [point(1, 1, 100.0), point(1, 4, 200.0)]),
        LayoutFigures(2, raw, raw, raw, raw, [point(2, 1, 50.0), point(2, 4, 120.0)]),
    ]
    return ClusterFigures("tiny@1", options, layouts)


def test_the_text_shows_each_load_the_hops_the_yardsticks_and_the_ratio(
    figures: ClusterFigures,
) -> None:
    text = "\n".join(to_lines(figures))

    assert all(name in text for name in STAGES)
    assert "200.0" in text
    assert "4.00" in text  # the ratio
    assert "0.200 ms p50" in text
    assert "classic queues, i8 wire" in text


def test_what_a_hop_costs_beyond_the_raw_limits(figures: ClusterFigures) -> None:
    layout = figures.layouts[1]

    # 7 ms a token, two hops of 2 ms of kernel each, and a raw message of 0.2 ms
    assert beyond_ms(layout, layout.points[0]) == pytest.approx(7.0 / 2 - 2.0 - 0.2)
    assert to_dict(figures)["layouts"][1]["points"][0]["beyond_raw_ms"] == pytest.approx(1.3)


def test_the_plot_compares_streams_and_groups_on_one_scale(figures: ClusterFigures) -> None:
    lines = plot_lines(figures)

    bars = {line.count("█"): line for line in lines if "█" in line}
    assert set(bars) == {10, 20, 24, 40}
    assert bars[40].endswith(" 200.0")
    assert "tok/s by groups" in lines


def test_json_holds_what_the_text_shows(figures: ClusterFigures) -> None:
    shown = to_dict(figures)

    assert shown["layouts"][1]["points"][0]["peer"]["ratio"] == 1.0
    assert shown["layouts"][0]["points"][0]["hops"][0]["stage_ms"]["compute"] == 2.0
    assert (shown["options"]["queue_type"], shown["options"]["wire"]) == ("classic", "i8")


def test_a_picture_is_drawn_or_refused_before_anything_is_measured(
    figures: ClusterFigures, tmp_path: Path
) -> None:
    path = tmp_path / "plot.png"

    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            check_plot(path)
    else:
        check_plot(path)
        draw(figures, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_peers_events_count_by_what_its_last_one_says() -> None:
    times = iter([1.0, 2.0])
    lines = [
        b'data: {"content": "a", "stop": false}\n', b"\n",
        b'data: {"content": "bc", "stop": false}\n', b"\n",
        b'data: {"content": "", "stop": true, "tokens_predicted": 3}\n',
    ]  # fmt: skip

    assert read_events(iter(lines), lambda: next(times)) == ((1.0, 2.0), 3)


def test_a_peers_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(ValueError, match="broke off"):
        read_events(iter([b'data: {"content": "a"}\n']), lambda: 0.0)


def test_a_peer_without_its_binaries_is_refused_before_anything_starts(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.touch(mode=0o755)

    open_llama_peer(tmp_path, tmp_path / "model.gguf", ClusterOptions("tiny", num_groups=(1,)))
    with pytest.raises(ConfigError, match="rpc-server"):
        open_llama_peer(tmp_path, tmp_path / "model.gguf", ClusterOptions("tiny", num_groups=(2,)))


def test_lists_of_numbers_are_read_strictly() -> None:
    assert numbers("1, 4,16,4", field="--concurrency") == (1, 4, 16)
    for text in ("", "1,,2", "0", "-1", "two", "257", "²"):
        with pytest.raises(ConfigError, match="--concurrency"):
            numbers(text, field="--concurrency", most=256)
