"""The report as one HTML file that needs nothing else: styles inline, the chart embedded."""

import re
from base64 import b64encode
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from pipeline.report import FIRST_STEPS, Advice
from pipeline.report.report import Report
from pipeline.report.tables import efficiency, speedup, with_spread

_WINDOWS = (
    "Throughput and step time are the median of several windows, ± half of their range. The interval of a speedup is "
    "that of the slowest window over the baseline's fastest, and of the fastest over its slowest."
)
_REPEATS = (
    "All trials are measured once, then all of them again (A B C A B C), so that drift of the machine hits them alike. "
    "Throughput and step time are the median of these repeats, ± half of their range. A speedup is the median of the "
    "ratios to the baseline within the same round, its interval the lowest and the highest of them."
)
_PARTS = (
    "Step and data wait are those of the training: what a step waits for its batches, on the rank that waits longest. "
    "The other parts are measured by leaving something out, in turn, when training is over. Compute: forward and "
    "backward of the slowest rank on a batch held in memory, without exchange of gradients. Exposed communication: "
    "what gradient exchange adds. Rest: what the optimizer, clipping and book-keeping add. Sum: all of these, to "
    "compare with the step."
)
_RESOURCES = (
    "Peak memory is what is allocated on a GPU, and what is resident of a process on CPU. The first step ends as many "
    "seconds after the launch of the workers."
)


def save_page(report: Report, chart: Path, path: Path) -> None:
    """Write the page; ``chart`` is the PNG that `pipeline.report.chart.save_chart` has drawn, if it could."""
    page = _template("report.html.jinja").render(
        report=report,
        rate=with_spread(report.main.samples_per_second),
        speedup=speedup(report.main, has_interval=False),
        efficiency=efficiency(report.main),
        advice=[(advice.reason.rstrip("."), tuple(marked(advice))) for advice in report.advice],
        chart=b64encode(chart.read_bytes()).decode("ascii") if chart.is_file() else "",
        method=tuple(_method(report)),
    )
    path.write_text(page, encoding="utf-8")


def fragment(report: Report, chart: Path, *, places: str) -> str:
    """Result and chart for a notebook, as HTML that needs nothing else; without the chart if its file is gone.

    Args:
        report: what came out.
        chart: the PNG.
        places: where all of it is, line by line.
    """
    picture = b64encode(chart.read_bytes()).decode("ascii") if chart.is_file() else ""
    return _template("fragment.html.jinja").render(report=report, chart=picture, places=places)


def _template(name: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("pipeline.report").joinpath(name).read_text("utf-8"))


def marked(advice: Advice) -> Iterator[tuple[str, bool]]:
    """What to do in pieces, and of each whether it is YAML for the experiment file."""
    section = re.escape(advice.key.partition(".")[0])
    yaml = rf"(\b{section}\b[\w.]*: (?:\{{.*\}}|\[.*?\]|[^\s;,]*[^\s;,.]))"
    pieces = re.split(yaml, advice.change) if section else [advice.change]
    yield from ((piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece)


def _method(report: Report) -> Iterator[str]:
    strong = "Strong scaling: every trial trains the same global batches."
    weak = " Weak scaling: every replica has as many samples of a global batch as the baseline's."
    has_weak = any(entry.scaling == "weak" for entry in report.entries)
    yield (
        f"{strong}{weak if has_weak else ''} Throughput is that of the steady state, without warm-up, evaluation and "
        "checkpoints; speedup is throughput over the baseline's; efficiency is speedup over the ratio of replicas. "
        "Each worker has a fixed number of cores: N workers have N times the cores of one."
    )
    yield _REPEATS if len(report.rows[0].repeats) > 1 else _WINDOWS
    yield _PARTS
    if any(row.same_training for row in report.rows):
        yield (
            "The same loss: the losses of the first steps of training lie no further from the baseline's than "
            f"{report.rows[0].loss_tolerance:g}, relative to the loss where it is above 1; 'at first': those of the "
            f"first {FIRST_STEPS} do."
        )
    yield _RESOURCES
