"""The pictures of a report: texts that touch no other, nothing cut off, no empty axes, SVG that the page can color."""

import math
import re
import struct
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from samples import DDP_4, HARDWARE, MAIN, comparison, finished, in_turn, report, spread, swept, trial

from pipeline.protocol.events import Finished
from pipeline.report import Unmeasured, chart, curves, pairs, sweep_chart
from pipeline.report.courses import Course, Pause, Series, Window
from pipeline.report.palette import LIGHT
from pipeline.report.picture import NARROW, PNG, WIDE, Canvas, Draw, Key, fitted, inline, save_png, text_width
from pipeline.report.report import Report

CANVASES = [PNG, WIDE, NARROW]
LONG = "deepspeed_zero_stage_3_with_offloaded_optimizer_states"


def crowded() -> Report:
    """Eight strategies with long names and large figures, one with a wide interval, and two that are not measured."""
    trials = [trial("baseline", "baseline"), trial("reference", "reference", cpus=16)]
    trials += [trial(f"cell-{n}", "cell", strategy=f"{LONG}_{n}"[-8 * n :], workers=2**n) for n in range(1, 6)]
    trials.append(trial("weak", "cell", strategy=LONG, workers=4, scaling="weak", batch=256))
    rates = [1_234_567.0 * (1 + index) for index in range(len(trials))]
    ends = [
        finished(
            one.name, spread(rate), slots=in_turn(rate, noise=0.5 if one.name == "cell-3" else 0.02),
            communication=0.001, batch=64_000_000, data_wait=3.0,
        )
        for one, rate in zip(trials, rates, strict=True)
    ]  # fmt: skip
    return Report.of(trials, ends, hardware=HARDWARE * 3, unmeasured=[DDP_4, UNMEASURED])


UNMEASURED = Unmeasured(
    trial="fsdp-8",
    title=f"{LONG} x 8",
    strategy=LONG,
    workers=8,
    reason="it needs 8 GPUs, of which there are none; " * 9,
)


def training(steps: int = 100, *, metrics: tuple[str, ...] = ("accuracy",), gap: int | None = None) -> Course:
    """A training that learns, with two evaluations in the middle and at the end."""
    values = [2.0 * math.exp(-3 * step / steps) + 0.1 * math.sin(step) + 0.2 for step in range(1, steps + 1)]
    if gap is not None:
        values[gap] = math.nan
    step = list(map(float, range(1, steps + 1)))
    seconds = [0.01 * each for each in step]
    ends = [steps // 2, steps]
    validation = {
        f"validation/{name}": Series([float(end) for end in ends], [0.01 * end for end in ends], [0.5, 0.4 + index])
        for index, name in enumerate(("loss", *metrics))
    }
    half = 0.005 * steps
    return Course(
        title="ddp, 2 workers",
        trial="main",
        steps_per_epoch=steps // 2,
        loss=Series(step, seconds, values),
        learning_rate=Series(step, seconds, [0.1 * (1 - each / (2 * steps)) for each in step]),
        validation=validation,
        windows=[Window(0, half, 6400.0), Window(1.2 * half, 2 * half, 6300.0)],
        pauses=[Pause(half, 1.2 * half, "evaluation"), Pause(1.2 * half, 1.21 * half, "checkpoint")],
        _now=2.2 * half,
    )


def several(count: int) -> list[Course]:
    trainings = [training(90 + index) for index in range(count)]
    for index, course in enumerate(trainings):
        course.title = f"trial {index}: optimizer.lr=0.0012345, model.hidden_layers={index}"
    return trainings


DRAWINGS: dict[str, Draw] = {
    "chart": lambda canvas: chart.draw(report(), canvas),
    "chart without pairs": lambda canvas: chart.draw(report(has_pairs=False), canvas),
    "chart of a comparison": lambda canvas: chart.draw(comparison(), canvas),
    "crowded chart": lambda canvas: chart.draw(crowded(), canvas),
    "pairs": lambda canvas: pairs.draw(report(), canvas),
    "curves": lambda canvas: curves.draw([training()], canvas, title="resnet-digits"),
    "curves with long names": lambda canvas: curves.draw(
        [training(metrics=(LONG, f"{LONG}_per_class", "f1"))], canvas, title=LONG * 4
    ),
    "curves of 8 trials": lambda canvas: curves.draw(several(8), canvas, title="resnet-digits", best=2),
    "sweep": lambda canvas: sweep_chart.draw(swept(9).swept, canvas),
    "sweep of 40 trials": lambda canvas: sweep_chart.draw(swept(40).swept, canvas),
    "curves of 30 trials": lambda canvas: curves.draw(several(30), canvas, title="resnet-digits", best=2),
}


@pytest.mark.parametrize("canvas", CANVASES, ids=lambda canvas: canvas.name)
@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_touches_another_or_is_cut_off(name: str, canvas: Canvas) -> None:
    figure = DRAWINGS[name](canvas)
    figure.set_dpi(160)  # as it is saved
    boxes = dict(boxes_of(figure))
    for (first, box), (second, other) in combinations(boxes.items(), 2):
        assert not box.overlaps(other), (first.get_text(), second.get_text())
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in boxes.items():
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, text.get_text()


def boxes_of(figure: Figure) -> Iterator[tuple[Text, Bbox]]:
    """The texts that are drawn and their places, in pixels."""
    figure.draw_without_rendering()
    shown = [*figure.texts, *(label for axes in figure.axes for label in tick_labels(axes))]
    yield from ((text, text.get_window_extent()) for text in shown if text.get_text().strip())


def tick_labels(axes: Axes) -> Iterator[Text]:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def said(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


@pytest.mark.parametrize("count", [1, 6])
def test_the_chart_is_a_png_as_high_as_its_rows_need(tmp_path: Path, count: int) -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in range(2, count + 1)]
    ends: list[Finished] = [finished(t.name, spread(100 + t.workers, noise=3)) for t in (MAIN, *more)]
    result = Report.of([MAIN, *more], ends, hardware=r"$\frac{1}$ cores")  # looks like a formula
    save_png(partial(chart.draw, result), tmp_path / "chart.png")

    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600
    assert 46 * count < height / 160 * 72 < 46 * count + 140
    assert len(data) > 15_000  # an empty canvas of this size compresses to far less


def test_the_chart_has_each_pair_its_interval_and_the_ideal_of_equal_devices() -> None:
    result = report()
    figure = chart.draw(result, WIDE)
    rates, steps = figure.axes
    dots = [line for line in rates.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [8, 8]
    assert [segment[0][0] for each in ideals(rates) for segment in each] == pytest.approx([200.0, 200.0])
    assert "ideal: linear scaling" in said(figure)
    assert "95% confidence interval" in said(figure)
    assert "1.90x" in said(figure)
    low = result.main.speedup_low
    assert low is not None
    ends = [
        float(path.vertices[0][0]) for bar in rates.containers if hasattr(bar, "has_xerr") for path in whiskers(bar)
    ]
    assert any(end == pytest.approx(100 * low) for end in ends)
    assert len(steps.containers) == 5


def ideals(axes: Axes) -> list[list[list[float]]]:
    """The segments of the dashed lines."""
    from matplotlib.collections import LineCollection

    return [
        each.get_segments()
        for each in axes.collections
        if isinstance(each, LineCollection) and each.get_linestyles()[0][1] is not None
    ]


def whiskers(container: object) -> list[object]:
    return [path for collection in container.lines[2] for path in collection.get_paths()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("devices", "expected"), [("cpu", 400.0), ("cuda", 200.0)])
def test_the_ideal_counts_the_devices_that_compute(devices: str, expected: float) -> None:
    """A process with all cores is held to what as many workers are held to."""
    baseline, other = (
        report().rows[0],
        report().rows[1].model_copy(update={"device": devices, "cpus": 4, "replicas": 2}),
    )
    assert chart.ideal(other, baseline) == pytest.approx(expected)


def test_the_curves_of_a_training_have_no_empty_axes() -> None:
    assert [titles(curves.draw([one], WIDE)) for one in (training(), bare())] == [
        ["Loss", "validation/accuracy", "Learning rate", "Throughput, samples/s"],
        ["Loss"],
    ]
    for figure in (curves.draw([training()], NARROW), curves.draw(several(3), NARROW)):
        assert all(axes.lines for axes in figure.axes)


def titles(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts if text.get_weight() == "bold"]


def bare() -> Course:
    """A training at a constant learning rate that was neither evaluated nor long enough for two windows."""
    course = training()
    return Course(
        title="single", loss=course.loss, learning_rate=Series([1, 2], [0, 1], [0.1, 0.1]), windows=course.windows[:1]
    )


def test_the_best_value_is_named_with_its_epoch() -> None:
    figure = curves.draw([training()], WIDE)
    assert "best 1.4 in epoch 2" in said(figure)
    assert "validation: best 0.4 in epoch 2" in said(figure)
    rings = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [float(line.get_ydata()[0]) for line in rings if line.get_marker() == "o"] == [0.4, 1.4]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    loss = curves.draw([training(gap=50)], WIDE).axes[0]
    raw, smooth, *_ = loss.lines
    assert [math.isnan(line.get_ydata()[50]) for line in (raw, smooth)] == [True, True]
    assert "A gap is a loss" in curves.caption([training(gap=50)])
    assert "A gap is a loss" not in curves.caption([training()])


def test_the_throughput_has_a_gap_while_the_model_is_evaluated() -> None:
    throughput = curves.draw([training()], WIDE).axes[-1]
    (line,) = (line for line in throughput.lines if len(line.get_xdata()) > 2)
    assert [math.isnan(y) for y in line.get_ydata()] == [False, False, True, False, False]
    assert len(throughput.collections) == 2  # evaluation, checkpoint


def test_losses_over_decades_have_a_logarithmic_axis() -> None:
    course = training()
    assert curves.draw([course], WIDE).axes[0].get_yscale() == "linear"
    course.loss.values[0] = 1e4
    figure = curves.draw([course], WIDE)
    assert figure.axes[0].get_yscale() == "log"
    assert any(label.get_text() == "1,000" for label, _ in boxes_of(figure))


def test_trials_are_compared_by_step_and_by_time() -> None:
    figure = curves.draw(several(3), WIDE, best=1)
    assert titles(figure) == ["Train loss, smoothed"] * 2 + ["validation/accuracy"] * 2
    assert [text.get_text() for text in figure.texts if text.get_text() in ("step", "seconds")] == [
        "step",
        "seconds",
    ] * 2
    by_step, by_time, *_ = figure.axes
    assert by_step.lines[0].get_xdata()[-1] == 90
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(0.9)
    assert by_step.lines[-1].get_linewidth() > by_step.lines[0].get_linewidth()
    assert all(course.title in said(figure) for course in several(3))


def test_of_many_trials_the_best_has_a_color() -> None:
    figure = curves.draw(several(30), WIDE, best=4)
    colors = [line.get_color() for line in figure.axes[0].lines]
    assert colors == [LIGHT["grey"]] * 29 + [LIGHT["accent"]]
    assert "29 other trainings" in said(figure)


def test_svg_is_in_the_colors_and_the_font_of_the_page() -> None:
    svg = inline(DRAWINGS["chart"], name="speedup", label='speedup of "ddp" & more')
    assert svg.count("<svg ") == 2
    assert [f'<svg class="{name}" viewBox="8 0 ' in svg for name in ("wide", "narrow")] == [True, True]
    assert 'aria-label="speedup of &quot;ddp&quot; &amp; more"' in svg
    assert "var(--ink)" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert "font-family" not in svg
    assert "http" not in svg
    assert ">1 process, both cores<" in svg


def test_pictures_of_a_page_refer_to_nothing_but_themselves() -> None:
    page = "".join(inline(DRAWINGS[name], name=name.split()[0], label="") for name in ("chart", "curves", "pairs"))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(|href=\")#([^\")]*)", page)) <= set(ids)


@pytest.fixture(scope="module")
def long_training() -> tuple[str, str]:
    """SVG and caption of 100,000 steps."""
    course = training(100_000, gap=77)
    return inline(partial(curves.draw, [course]), name="curves", label=""), curves.caption([course])


def test_a_long_training_is_small(long_training: tuple[str, str]) -> None:
    svg, caption = long_training
    assert len(svg) < 400_000
    assert "every 334 steps" in caption


def test_text_that_does_not_fit_ends_with_an_ellipsis() -> None:
    assert fitted("short", width=100, size=10) == "short"
    cut = fitted(LONG, width=100, size=10)
    assert cut.endswith("…")
    assert 80 < text_width(cut, size=10) <= 100


def test_a_legend_flows_like_words() -> None:
    from pipeline.report.picture import legend_height

    keys = [Key(f"entry {n}", LIGHT["ink"]) for n in range(6)]
    heights = [legend_height(keys, width=width, canvas=WIDE) for width in (700, 200, 70)]
    assert heights == [14, 28, 84]
    assert legend_height([], width=100, canvas=WIDE) == 0
