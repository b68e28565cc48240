"""Metrics on traces made by hand, and the reports made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.errors import ConfigError
from llmc.load_test import report
from llmc.load_test.metrics import (
    BenchMetrics,
    Distribution,
    RequestTrace,
    compute_metrics,
    parse_goodput,
    parse_metric_names,
    parse_percentiles,
)

# Sent at 10 s, four tokens: TTFT 100 ms, gaps 20, 30 and 50 ms, E2EL 200 ms.
FIRST = RequestTrace(
    sent_s=10.0, token_times_s=(10.1, 10.12, 10.15, 10.2), prompt_tokens=8, output_tokens=4
)
# Two chunks that carried five tokens: TPOT counts tokens, ITL counts chunks.
SECOND = RequestTrace(sent_s=10.5, token_times_s=(10.7, 11.1), prompt_tokens=2, output_tokens=5)
SINGLE = RequestTrace(sent_s=11.0, token_times_s=(11.3,), prompt_tokens=1, output_tokens=1)
FAILED = RequestTrace(sent_s=10.0, error="HTTP 500")


@pytest.fixture
def metrics() -> BenchMetrics:
    return compute_metrics([FIRST, SECOND, SINGLE, FAILED], 2.0, percentiles=[50, 90])


def test_times_of_one_request() -> None:
    assert FIRST.ttft_s == pytest.approx(0.1)
    assert FIRST.e2el_s == pytest.approx(0.2)
    assert FIRST.tpot_s == pytest.approx((0.2 - 0.1) / 3)
    assert FIRST.itls_s == pytest.approx([0.02, 0.03, 0.05])
    assert SECOND.tpot_s == pytest.approx(0.4 / 4)
    assert SECOND.itls_s == pytest.approx([0.4])
    assert SINGLE.tpot_s is None and SINGLE.itls_s == []


def test_totals_and_rates(metrics: BenchMetrics) -> None:
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (11, 10)
    assert metrics.request_throughput == pytest.approx(1.5)
    assert metrics.output_throughput == pytest.approx(5.0)
    assert metrics.total_token_throughput == pytest.approx(10.5)
    assert metrics.request_goodput is None


def test_distributions(metrics: BenchMetrics) -> None:
    keys = metrics.as_json()
    assert keys["mean_ttft_ms"] == pytest.approx(200.0)
    assert keys["median_ttft_ms"] == pytest.approx(200.0)
    assert keys["p90_ttft_ms"] == pytest.approx(280.0)  # linear between 200 and 300
    assert keys["std_ttft_ms"] == pytest.approx(81.6497, abs=1e-3)
    assert keys["mean_tpot_ms"] == pytest.approx((100 / 3 + 100) / 2)  # the single is left out
    assert keys["mean_itl_ms"] == pytest.approx(500 / 4)
    assert keys["median_itl_ms"] == pytest.approx(40.0)
    assert keys["mean_e2el_ms"] == pytest.approx((200 + 600 + 300) / 3)
    assert keys["p50_e2el_ms"] == keys["median_e2el_ms"]


@pytest.mark.parametrize("duration_s", [0.3, 1.4, 2.0, 2.99])
def test_the_peak_is_not_below_the_mean(duration_s: float) -> None:
    """Of tokens at the two ends, no second has more than half."""
    ends = [
        RequestTrace(sent_s=5.0, token_times_s=(5.0 + at,), prompt_tokens=1, output_tokens=10)
        for at in (0.0, duration_s)
    ]
    found = compute_metrics(ends, duration_s)
    assert found.max_output_tokens_per_s >= found.output_throughput


def test_peaks(metrics: BenchMetrics) -> None:
    # Seconds since the first request: [0, 1) has 4 tokens and half of 5, [1, 2) has 2.5 + 1.
    assert metrics.max_output_tokens_per_s == pytest.approx(6.5)
    assert metrics.max_concurrent_requests == 2  # the single overlaps the second for 0.1 s
    alone = RequestTrace(sent_s=11.1, token_times_s=(12.0,), output_tokens=1)
    assert compute_metrics([FIRST, SECOND, alone], 2.0).max_concurrent_requests == 1


def test_goodput_needs_every_limit_met() -> None:
    traces = [FIRST, SECOND, SINGLE]
    limits = parse_goodput(["ttft:250", "tpot:50"])
    assert compute_metrics(traces, 2.0, goodput_ms=limits).request_goodput == pytest.approx(0.5)
    limits = parse_goodput(["ttft:300.1,tpot:101", "e2el:601"])
    assert compute_metrics(traces, 2.0, goodput_ms=limits).request_goodput == pytest.approx(1.5)


def test_nothing_measured_is_zero_and_valid_json() -> None:
    keys = compute_metrics([FAILED], 1.0).as_json()
    assert keys["completed"] == 0 and keys["mean_ttft_ms"] == 0.0
    assert json.dumps(keys, allow_nan=False)


def test_percentile_keys_of_fractions() -> None:
    found = Distribution.of_seconds([1.0, 2.0], parse_percentiles("99.9,50"))
    assert set(found.keys("itl")) == {
        "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99.9_itl_ms", "p50_itl_ms",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "a", "101", "-1", "50,x", "nan"])
def test_bad_percentiles(text: str) -> None:
    with pytest.raises(ConfigError, match="percentiles must be"):
        parse_percentiles(text)


@pytest.mark.parametrize("items", [["ttft"], ["itl:3"], ["tpot:fast"], ["e2el:-1"], ["ttft:nan"]])
def test_bad_goodput(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="goodput must be"):
        parse_goodput(items)


def test_metric_names() -> None:
    assert parse_metric_names("ttft, e2el") == ["ttft", "e2el"]
    with pytest.raises(ConfigError, match="unknown metrics"):
        parse_metric_names("ttft,speed")


def test_block_has_the_known_labels(metrics: BenchMetrics) -> None:
    rows = report.serving_rows(metrics, max_concurrency=4, request_rate=2.0)
    sections = report.latency_sections(metrics, ["ttft", "tpot", "itl", "e2el"])
    lines = report.format_block("Serving Benchmark Result", [(None, rows), *sections]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} 3"
    labels = [line.rpartition(":")[0] for line in lines if ":" in line]
    assert labels[:12] == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
    ]
    assert labels[12:16] == ["Mean TTFT (ms)", "Median TTFT (ms)", "P50 TTFT (ms)", "P90 TTFT (ms)"]
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert lines[-1] == "=" * 50


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    report.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError):
        report.write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_paths_are_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        report.check_can_write(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        report.check_can_write(None, tmp_path / "no" / "x.json")
    report.check_can_write(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []


def test_context_names_time_and_command() -> None:
    found = report.context(["/usr/bin/llmc", "bench", "serve", "--extra-body", "{}"])
    assert found["command"] == "llmc bench serve --extra-body '{}'"
    assert len(found["date"]) == len("20260101-000000")


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: there is no plot")
    path = tmp_path / "plot.png"
    report.write_plot(path, "speed", {"ttft": [1.0, 2.0, 5.0], "itl": [], "e2el": [3.0]})
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing to plot"):
        report.write_plot(path, "speed", {"ttft": []})


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report.check_can_plot()


@pytest.mark.parametrize("values", [[5.0], [1.0, 1.01, 1.02], [1.0, 1000.0], [float(10**7)] * 3])
def test_labels_of_a_plot_do_not_overlap(values: list[float]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    title = "a/model-with-a-long-name on a machine with a long name, 100 requests at 4.00 a second"
    figure = report.draw_plot(title, {"ttft": values, "itl": values})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for axes in figure.axes:
        labels = [text.get_window_extent(renderer) for text in axes.texts]
        ticks = [t.get_window_extent(renderer) for t in axes.get_yticklabels()]
        assert len(labels) == 2 and not labels[0].overlaps(labels[1])
        assert not any(label.overlaps(tick) for label in labels for tick in ticks)
    drawn_title = figure._suptitle.get_window_extent(renderer)
    assert drawn_title.x0 >= 0 and drawn_title.x1 <= figure.bbox.x1
