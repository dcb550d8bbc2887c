"""The pictures of a report: texts that touch no other, nothing cut off, no empty axes, SVG that the page can color."""

# promise: the report's page: each earlier run gets it, curves, no overlap, contrast, colors for color-blind readers

import math
import re
import struct
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from samples import DDP_4, HARDWARE, MAIN, comparison, finished, in_turn, report, spread, trial

from pipeline.protocol.events import Finished
from pipeline.report.numbers.courses import Course, Pause, Series, Window
from pipeline.report.numbers.row import Unmeasured
from pipeline.report.pictures import chart, curves, pairs
from pipeline.report.pictures.palette import LIGHT
from pipeline.report.pictures.picture import STYLE, Draw, save, shorten
from pipeline.report.report import Report

LONG = "deepspeed_zero_stage_3_with_offloaded_optimizer_states"


def crowded() -> Report:
    """Eight strategies with long names and large figures, one with a wide interval, and two that are not measured."""
    trials = [trial("baseline", "baseline"), trial("reference", "reference", cpus=16)]
    trials += [trial(f"cell-{n}", "cell", strategy=f"{LONG}_{n}"[-8 * n :], workers=2**n) for n in range(1, 6)]
    trials.append(trial("larger", "cell", strategy=LONG, workers=4, batch=256))
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
    "chart": lambda: chart.draw(report()),
    "chart without pairs": lambda: chart.draw(report(has_pairs=False)),
    "chart of a comparison": lambda: chart.draw(comparison()),
    "crowded chart": lambda: chart.draw(crowded()),
    "pairs": lambda: pairs.draw(report()),
    "curves": lambda: curves.draw([training()]),
    "curves with long names": lambda: curves.draw([training(metrics=(LONG, f"{LONG}_per_class", "f1"))]),
    "curves of 8 trials": lambda: curves.draw(several(8), best=2),
    "curves of 30 trials": lambda: curves.draw(several(30), best=2),
}


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_touches_another_or_is_cut_off(name: str) -> None:
    figure = DRAWINGS[name]()
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
    shown = [*texts(figure), *(label for axes in figure.axes for label in tick_labels(axes))]
    yield from ((text, text.get_window_extent()) for text in shown if text.get_text().strip())


def texts(figure: Figure) -> list[Text]:
    """All texts but the labels of ticks."""
    ticks = {id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in ticks_of(axis)}
    return [text for text in figure.findobj(Text) if id(text) not in ticks]


def ticks_of(axis: Axis) -> Iterator[Text]:
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        yield from (tick.label1, tick.label2)


def tick_labels(axes: Axes) -> Iterator[Text]:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def said(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in texts(figure))


@pytest.mark.parametrize("count", [1, 6])
def test_the_chart_is_a_png_as_high_as_its_rows_need(tmp_path: Path, count: int) -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in range(2, count + 1)]
    ends: list[Finished] = [finished(t.name, spread(100 + t.workers, noise=3)) for t in (MAIN, *more)]
    result = Report.of([MAIN, *more], ends, hardware=r"$\frac{1}$ cores")  # looks like a formula
    save(partial(chart.draw, result), tmp_path / "chart.png", title=r"$\frac{1}$", label="")

    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600
    assert 46 * count < height / 160 * 72 < 46 * count + 160
    assert len(data) > 15_000  # an empty canvas of this size compresses to far less


def test_the_chart_has_each_pair_its_interval_and_the_ideal_of_equal_devices() -> None:
    result = report()
    figure = chart.draw(result)
    rates, steps = figure.axes
    dots = [line for line in rates.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [16]
    assert [segment[0][0] for each in ideals(rates) for segment in each] == pytest.approx([200.0, 200.0])
    assert "ideal: linear scaling" in said(figure)
    assert "95% confidence interval" in said(figure)
    assert "1.90x" in said(figure)
    low = result.main.speedup_ci_low
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
    assert [titles(curves.draw([one])) for one in (training(), bare())] == [
        ["Loss", "validation/accuracy", "Learning rate", "Throughput, samples/s"],
        ["Loss"],
    ]
    for figure in (curves.draw([training()]), curves.draw(several(3))):
        assert all(axes.lines for axes in figure.axes)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def bare() -> Course:
    """A training at a constant learning rate that was neither evaluated nor long enough for two windows."""
    course = training()
    return Course(
        title="single", loss=course.loss, learning_rate=Series([1, 2], [0, 1], [0.1, 0.1]), windows=course.windows[:1]
    )


def test_the_best_value_is_named_with_its_epoch() -> None:
    figure = curves.draw([training()])
    assert "best 1.4 in epoch 2" in said(figure)
    assert "validation: best 0.4 in epoch 2" in said(figure)
    rings = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [float(line.get_ydata()[0]) for line in rings if line.get_marker() == "o"] == [0.4, 1.4]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    loss = curves.draw([training(gap=50)]).axes[0]
    raw, smooth, *_ = loss.lines
    assert [math.isnan(line.get_ydata()[50]) for line in (raw, smooth)] == [True, True]
    assert "A gap is a loss" in curves.caption([training(gap=50)])
    assert "A gap is a loss" not in curves.caption([training()])


def test_the_throughput_has_a_gap_while_the_model_is_evaluated() -> None:
    throughput = curves.draw([training()]).axes[-1]
    (line,) = (line for line in throughput.lines if len(line.get_xdata()) > 2)
    assert [math.isnan(y) for y in line.get_ydata()] == [False, False, True, False, False]
    assert len(throughput.collections) == 2  # evaluation, checkpoint


def test_losses_over_decades_have_a_logarithmic_axis() -> None:
    course = training()
    assert curves.draw([course]).axes[0].get_yscale() == "linear"
    course.loss.values[0] = 1e4
    figure = curves.draw([course])
    assert figure.axes[0].get_yscale() == "log"
    assert any(label.get_text() == "1,000" for label, _ in boxes_of(figure))


def test_trials_are_compared_by_step_and_by_time() -> None:
    figure = curves.draw(several(3), best=1)
    assert titles(figure) == ["Train loss, smoothed"] * 2 + ["validation/accuracy"] * 2
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "seconds"] * 2
    by_step, by_time, *_ = figure.axes
    assert by_step.lines[0].get_xdata()[-1] == 90
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(0.9)
    emphasized, other = by_step.lines[1], by_step.lines[0]
    assert emphasized.get_linewidth() > other.get_linewidth()
    assert emphasized.get_zorder() > other.get_zorder()
    assert all(course.title in said(figure) for course in several(3))


def test_of_many_trials_the_best_has_a_color() -> None:
    figure = curves.draw(several(30), best=4)
    colors = [line.get_color() for line in figure.axes[0].lines]
    assert [index for index, color in enumerate(colors) if color != LIGHT["grey"]] == [4]
    assert colors[4] == LIGHT["accent"]
    assert "29 other trainings" in said(figure)


def svg(name: str, folder: Path, *, label: str = "") -> str:
    return save(DRAWINGS[name], folder / f"{name.split()[0]}.png", title="lab", label=label)


def test_svg_is_in_the_colors_of_the_page(tmp_path: Path) -> None:
    drawn = svg("chart", tmp_path, label='speedup of "ddp" & more')
    assert drawn.startswith('<svg viewBox="0 0 720 ')
    assert 'aria-label="speedup of &quot;ddp&quot; &amp; more"' in drawn
    assert "var(--ink)" in drawn
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn)
    assert "http" not in drawn
    assert ">1 process, both cores, 2 cores<" in drawn


def test_pictures_of_a_page_refer_to_nothing_but_themselves(tmp_path: Path) -> None:
    page = "".join(svg(name, tmp_path) for name in ("chart", "curves", "pairs"))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(|href=\")#([^\")]*)", page)) <= set(ids)


@pytest.fixture(scope="module")
def long_training(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """SVG and caption of 100,000 steps."""
    course = training(100_000, gap=77)
    path = tmp_path_factory.mktemp("long") / "curves.png"
    return save(partial(curves.draw, [course]), path, title="lab", label=""), curves.caption([course])


def test_a_long_training_is_small(long_training: tuple[str, str]) -> None:
    svg, caption = long_training
    assert len(svg) < 400_000
    assert "every 334 steps" in caption


def test_text_that_is_too_long_ends_with_an_ellipsis() -> None:
    assert shorten("short", most=5) == "short"
    assert shorten("too long", most=5) == "too…"
