"""One estimator for each figure: tables, sentences, the chart, JSON and MLflow say the same; and their doubts."""

import json
from pathlib import Path

import matplotlib.pyplot
import pytest
from matplotlib.figure import Figure
from samples import BASELINE, DDP_2, HARDWARE, MAIN, finished, spread, trial

from pipeline.protocol import estimates
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import Spread
from pipeline.recording.mlflow_entities import figures
from pipeline.report import Row, publish
from pipeline.report.chart import save_chart
from pipeline.report.report import Report, comparison_json
from pipeline.report.tables import efficiency, rate, speedup, with_spread

OTHER = trial("ddp-3", "cell", strategy="ddp", workers=3)
REPEATS = {"baseline": (100, 300, 110), "ddp-2": (40, 36, 90), "ddp-3": (30, 33, 80)}
"""Of which the medians of ratios are no ratios of each other: 0.40, 0.30, and 1.13 of one another."""


def compared() -> Report:
    ends = [finished(name, spread(rate), repeat=n) for name, rates in REPEATS.items() for n, rate in enumerate(rates)]
    return Report.of([BASELINE, DDP_2, OTHER], ends, hardware=HARDWARE)


def test_ratios_agree_with_each_other_and_with_the_table() -> None:
    baseline, two, three = compared().rows
    assert two.speedup == pytest.approx(two.samples_per_second.median / baseline.samples_per_second.median)
    assert two.throughput_over(three).median == pytest.approx(two.speedup / three.speedup)  # type: ignore[operator]
    for row in (two, three):
        assert row.speedup_low <= row.speedup <= row.speedup_high  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(20))
def test_a_ratio_lies_within_the_range_of_its_pairs(seed: int) -> None:
    own = [1.0 + (seed * 37 + n * n * 11) % 17 for n in range(3 + seed % 4)]
    base = [1.0 + (seed * 13 + n * n * 7) % 19 for n in range(len(own))]
    ratio = estimates.ratio(estimates.spread(own), estimates.spread(base), pairs=list(zip(own, base, strict=True)))
    assert ratio.low <= ratio.median <= ratio.high


def test_table_sentence_json_and_mlflow_have_the_same_figures() -> None:
    report = compared()
    two = report.rows[1]
    (record,) = [cell for cell in json.loads(comparison_json(report))["cells"] if cell["title"] == two.title]
    assert record["speedup"] == two.speedup
    assert record["step_ms"] == two.step_ms.median
    assert report.results.rows[1][3].startswith(f"{two.speedup:.2f}x") or report.results.rows[1][3].endswith("x")
    points = {point.name: point.value for point in figures(finished("ddp-2", spread(40)))}
    assert (points["samples_per_second"], points["step_ms"]) == (40, 1600)
    assert not {"throughput/samples_per_second", "time/step_ms"} & points.keys()  # the series of windows


def busy(rate: Spread, *, cpus: int = 1) -> Row:
    ends = [finished("baseline", spread(470, noise=300)), finished("main", rate)]
    return Report.of([MAIN, BASELINE], ends, hardware=HARDWARE).main


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Spread(median=3847, low=1200, high=11872, windows=3), "1,200 to 11,872"),
        (Spread(median=397, low=20, high=2854, windows=3), "20 to 2,854"),
        (Spread(median=375, low=361, high=389, windows=3), "375 ± 14"),
    ],
)
def test_a_range_larger_than_the_figure_stands_in_its_place(given: Spread, text: str) -> None:
    assert with_spread(given) == text
    assert rate(given) == text.split(" ± ")[0]


def test_a_speedup_that_may_be_anything_is_no_figure() -> None:
    ends = [finished("baseline", Spread(median=100, low=50, high=400, windows=3))]
    ends += [finished("main", Spread(median=190, low=24, high=611, windows=3))]
    report = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)

    assert speedup(report.main, has_interval=True) == "0.06x to 12.22x"
    assert efficiency(report.main) == "3% to 611%"
    assert report.headline.startswith(
        "ddp x 2 does 24 to 611 samples/s: 0.06x to 12.22x the throughput of single, scal"
    )
    assert "the machine was busy" in report.results.notes[0].lower()
    assert any("0.06x to 12.22x, is not resolved" in remark for remark in report.remarks)


def test_an_efficiency_above_one_has_its_range_and_a_reason() -> None:
    ends = [finished("baseline", spread(100, noise=4)), finished("main", spread(210, noise=8))]
    report = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)
    assert efficiency(report.main) == "97% to 114%"
    assert report.results.rows[-1][4] == "97% to 114%"
    assert report.results.notes[0].startswith("An efficiency above 100% comes from noise")


# The parts and the step


def missed(together_ms: float, *, noise: float = 3.0) -> Report:
    """A training whose steps take 337 ms, and parts that add up to another time."""
    end = finished("main", spread(190), communication=20.0)
    parts = end.result.parts.model_copy(update={"compute_ms": together_ms - 21.25})
    step_ms = spread(end.result.step_ms.median, noise=noise)
    result = end.result.model_copy(update={"parts": parts, "step_ms": step_ms})
    return Report.of([MAIN], [end.model_copy(update={"result": result})], hardware=HARDWARE)


@pytest.mark.parametrize(
    ("together_ms", "noise", "unexplained", "said"),
    [
        (200.0, 3.0, 136.8, "the parts add up to 200 ms, 137 ms less than a step"),
        (663.0, 3.0, -326.2, "the parts add up to 663 ms, 326 ms more than a step"),
        (310.0, 3.0, 0.0, ""),  # as exact as it gets
        (200.0, 140.0, 0.0, ""),  # noise
    ],
)
def test_parts_that_miss_the_step_are_told(together_ms: float, noise: float, unexplained: float, said: str) -> None:
    report = missed(together_ms, noise=noise)
    assert report.main.unexplained_ms == pytest.approx(unexplained, abs=0.1)
    assert bool(report.step_parts.notes) == bool(said)
    assert all(said in note and "the machine was busy" in note for note in report.step_parts.notes)


def bars(report: Report, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Where bars of the step's chart end, by their names, and the frame's, and what its label says."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    save_chart(report, folder / "chart.png")
    axes = drawn[0].axes[1]
    ends = {
        str(container.get_label()): max(patch.get_x() + patch.get_width() for patch in container.patches)
        for container in axes.containers
    }
    label = next(text.get_text() for text in axes.texts if text.get_text().endswith(" ms"))
    return {**ends, "label": float(label.removesuffix(" ms"))}


def test_the_chart_frames_the_step_and_shows_what_is_unexplained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = bars(missed(200.0), tmp_path, monkeypatch)
    frame = next(end for name, end in ends.items() if name.startswith("_"))
    assert ends["rest"] == pytest.approx(200.0)
    assert ends["unexplained"] == frame == pytest.approx(336.8, abs=0.1)
    assert ends["label"] == 337
    assert "unexplained" not in bars(missed(310.0), tmp_path, monkeypatch)
    matplotlib.pyplot.close("all")


def test_parts_that_could_not_be_measured_are_dashes() -> None:
    end = finished("main", spread(190), communication=20.0)
    parts = end.result.parts.model_copy(update=dict.fromkeys(("compute_ms", "rest_ms", "held_ms"), None))
    result = end.result.model_copy(update={"parts": parts.model_copy(update={"exposed_communication_ms": None})})
    report = Report.of([MAIN], [end.model_copy(update={"result": result})], hardware=HARDWARE)
    assert report.step_parts.rows[0][2:] == ("-", "-", "0.2", "-", "-")
    assert report.step_parts.notes == ("ddp x 2: the parts of a step could not be measured.",)
    assert Report.model_validate_json(report.to_json()) == report


def test_a_chart_that_can_t_be_drawn_costs_itself_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such font")

    monkeypatch.setattr("pipeline.report.chart.save_chart", fails)
    told: list[str] = []
    ends: list[Finished] = [finished("main", spread(190))]
    written = publish.save(Report.of([MAIN], ends, hardware=HARDWARE), tmp_path, warn=told.append)
    assert written == ("speedup.json", "speedup_table.json", "report.html")
    assert "<img" not in (tmp_path / "report.html").read_text()
    assert told == [f"{tmp_path / 'speedup.png'} could not be written: ValueError: no such font"]
