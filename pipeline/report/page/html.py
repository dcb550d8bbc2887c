"""The report as a self-contained HTML file: inline styles, pictures as SVG."""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pipeline.experiment.reported import PREFIX, single_names
from pipeline.experiment.values import Frozen
from pipeline.report.numbers.row import FIRST_STEPS, Advice, Row
from pipeline.report.page.about import About
from pipeline.report.pictures.palette import DARK, LIGHT
from pipeline.report.report import Report
from pipeline.report.report_files import AnyReport
from pipeline.report.text.claims import classify_speedup, describe_speedup
from pipeline.report.text.row_names import name_row
from pipeline.report.text.sentences import format_ending, iter_metric_names
from pipeline.report.text.tables import amount, efficiency, speedup
from pipeline.results.goodput import LABELS, Goodput
from pipeline.wording import duration

_WINDOWS = (
    "Throughput and step time are the median of several windows. The configurations were measured one after the other, "
    "so the range of a speedup goes from the slowest window over the baseline's fastest to the fastest window over the "
    "baseline's slowest. On a machine whose speed changes, this range may miss the true value."
)
_INTERLEAVED = (
    "{how} Background load therefore affects all of them. Throughput is the geometric mean over the {unit}. Speedup is "
    "the geometric mean of the ratios to the baseline in the same round. Its confidence interval is a Student's t "
    "interval, corrected for autocorrelation."
)
_SLOTS = _INTERLEAVED.format(
    how="After training, the configurations are timed alternately in short intervals.", unit="intervals"
)
_REPEATS = _INTERLEAVED.format(how="In each round, all configurations are measured once.", unit="repeats")
_PARTS = (
    "Step time is the global batch size divided by the throughput. Data loading is measured during training, on the "
    "rank that waits longest for its batches. The other parts are measured after training, by leaving out one of them. "
    "Compute: forward and backward of the slowest rank on a batch held in memory, without gradient synchronization. "
    "Exposed communication: the time that gradient synchronization adds. Optimizer and other: the time that the "
    "optimizer, clipping and bookkeeping add. Unaccounted: the step minus these parts. The parts are left out where "
    "they do not match the step."
)
_RESOURCES = (
    "Peak memory is the allocated memory of a GPU, or the resident memory of a process on CPU. Startup is the time "
    "from the launch of the workers to the end of the first step."
)

_PREDICTED = (
    "Predicted rows are calculated by a model of a step of DistributedDataParallel. It takes the times that one worker "
    "measured for loading, forward, backward and the optimizer, the sizes of the gradients, and bandwidth and latency "
    "of the network. All workers are assumed to be connected in the same way. Their speedup has no confidence interval."
)


class Drawn(NamedTuple):
    """A picture of the page."""

    svg: str
    label: str
    """Heading, and description for screen readers."""
    caption: str = ""


class Bar(Frozen):
    """A use of the training's wall clock."""

    use: str
    percent: int
    time: str


class Tile(Frozen):
    """A key figure at the top of the page."""

    figure: str
    label: str
    is_accented: bool = False


def save_page(report: AnyReport, path: Path, *, about: About, pictures: Mapping[str, Drawn]) -> None:
    """Write the page.

    Args:
        report: the report.
        path: file to write.
        about: facts about the run.
        pictures: pictures by their file names, in their order.
    """
    could_be_noise = not report.main.is_resolved
    colors = {"light": LIGHT, "dark": DARK, "has_accent": not could_be_noise}
    shared = {"report": report, "about": about, "pictures": pictures, **colors}
    path.write_text(_speedups(report, shared), encoding="utf-8")


def _speedups(report: Report, shared: Mapping[str, object]) -> str:
    return _template("report.html.jinja").render(
        shared,
        tiles=tuple(_tiles(report)),
        wall_clock=tuple(_wall_clock(report.goodput)) if report.goodput else (),
        metrics=sorted(report.main.metrics.items(), key=lambda metric: not metric[0].startswith(PREFIX)),
        advice=[(one.reason.rstrip("."), *marked(one), format_ending(one)) for one in report.advice],
        method=tuple(_method(report)),
    )


def _tiles(report: Report) -> Iterator[Tile]:
    """Yield the speedup, the quality of the model, the throughput and the startup time."""
    main = report.main
    if main.ratio is not None:
        yield _speedup_tile(main, report.rows[0])
    name = next(iter(single_names(iter_metric_names(main))), "")
    if not report.is_comparison and name:
        when = "at the end" if main.best is None else f"with the {main.best}"
        yield Tile(figure=_figure(main.metrics[name]), label=f"{name} {when}")
    elif main.efficiency is not None:
        yield Tile(figure=efficiency(main), label="scaling efficiency")
    yield Tile(figure=amount(main.samples_per_second.median), label=f"samples/s on {main.devices}")
    if main.time_to_first_step_s is not None:
        yield Tile(figure=f"{main.time_to_first_step_s:.1f} s", label="startup")


def _speedup_tile(main: Row, baseline: Row) -> Tile:
    """Return the speedup, or that it is not valid or inconclusive."""
    outcome = classify_speedup(main, baseline)
    assert main.ratio is not None
    value = "not valid" if outcome == "invalid" else speedup(main).partition(" (")[0]
    _, _, claim = describe_speedup(main, baseline).partition(": ")
    return Tile(figure=value, label=f"{name_row(main)}: {claim}", is_accented=outcome in ("faster", "slower"))


def _wall_clock(goodput: Goodput) -> Iterator[Bar]:
    """Yield each use of the wall clock that took a whole percent, and the steps."""
    for use, percent in goodput.percents.items():
        if percent or use == "steps":
            yield Bar(use=LABELS[use], percent=percent, time=duration(goodput.seconds.get(use, 0.0)))


def fragment(report: Report, chart: Path, *, places: str) -> str:
    """Render result and chart as self-contained HTML for a notebook; without the chart if its file is missing.

    Args:
        report: report to show.
        chart: PNG file.
        places: lines with the run's folder and its address in MLflow.
    """
    return _template("fragment.html.jinja").render(report=report, chart=_embedded(chart), places=places)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _embedded(picture: Path) -> str:
    return b64encode(picture.read_bytes()).decode("ascii") if picture.is_file() else ""


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("pipeline.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    environment.filters["name"] = name_row
    return environment.get_template(name)


def marked(advice: Advice) -> tuple[str, str]:
    """Split an advice's change into words and the overrides at its end, which may be empty."""
    return advice.change.removesuffix(advice.overrides), advice.overrides


def _method(report: Report) -> Iterator[str]:
    yield (
        "Strong scaling: every configuration trains the same global batches. Throughput is measured in the steady "
        "state, without warm-up, evaluation and checkpoints. Speedup is throughput over the baseline's throughput. "
        "Scaling efficiency is speedup over the ratio of devices. Each worker has a fixed number of cores: N workers "
        "have N times the cores of one."
    )
    has_pairs = len(report.rows[0].repeats) > 1
    yield (_REPEATS if report.is_comparison else _SLOTS) if has_pairs else _WINDOWS
    yield _PARTS
    if any(row.same_training for row in report.rows):
        yield (
            "Loss vs. baseline: the losses of the first training steps are the same if they differ by no more than "
            f"{report.main.loss_tolerance:g}, relative to the loss where it is above 1. 'Same early' means that "
            f"only the first {FIRST_STEPS} steps agree."
        )
    yield _RESOURCES
    if report.forecast:
        yield _PREDICTED
