"""The files of a report in the run's folder: JSON, table, pictures and page."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.protocol.events import AnyEvent
from pipeline.report.about import About
from pipeline.report.report import Report, comparison_json

if TYPE_CHECKING:
    from pipeline.report.courses import Course
    from pipeline.report.picture import Draw

_log = logging.getLogger(__name__)

CHART_NAME, CURVES_NAME = "speedup.png", "learning_curves.png"
PAIRS_NAME, PAIRS_CHART_NAME = "pairs.csv", "pairs.png"
PAGE_NAME = "report.html"
REPORT_NAME = "speedup.json"
"""File name of a `Report` in a run's folder."""


def save(
    report: Report,
    folder: Path,
    *,
    warn: Callable[[str], None],
    events: Iterable[AnyEvent] = (),
    about: Callable[[], About] = About,
) -> tuple[str, ...]:
    """Write the report as JSON, table, pictures and page; return the names of the files that were written.

    A picture or page that can't be written doesn't fail the run; ``warn`` gets a message.

    Args:
        report: the report.
        folder: the run's folder.
        warn: gets messages.
        events: the run's journal, for the learning curves.
        about: returns facts about the run.
    """
    texts = {REPORT_NAME: report.to_json() + "\n", "speedup_table.json": _table(report)}
    if report.is_comparison:
        texts["comparison.json"] = comparison_json(report) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    names, shown = list(texts), dict[str, str]()
    courses: list[Course] = []
    with _spared(folder / CURVES_NAME, warn):
        courses = _courses(report, events)
    if report.main.speedup_pairs > 1:
        with _spared(folder / PAIRS_NAME, warn):
            _save_pairs(report, folder)
            names.append(PAIRS_NAME)
    for name, draw, label in _drawings(report, courses):
        with _spared(folder / name, warn):
            shown[name] = _drawn(draw(), folder / name, label=label)
            names.append(name)
    with _spared(folder / PAGE_NAME, warn):
        _save_page(report, folder / PAGE_NAME, about=about(), pictures=shown, courses=courses)
        names.append(PAGE_NAME)
    return tuple(names)


@contextmanager
def _spared(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Turn an error inside into a warning: the figures are written, whatever goes wrong with a picture."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        _log.warning("%s could not be written", path, exc_info=error)
        warn(f"{path} could not be written: {type(error).__name__}: {error}")


# Imported here, since the first step shouldn't wait half a second for matplotlib.


def _drawings(report: Report, courses: "list[Course]") -> "Iterator[tuple[str, Callable[[], Draw], str]]":
    """Yield name, drawing and description of each picture."""
    if len(report.entries) > 1 or report.has_parts:
        yield CHART_NAME, partial(_chart, report), report.verdict
    if report.main.speedup_pairs > 1:
        yield PAIRS_CHART_NAME, partial(_pairs, report), f"Speedup of {report.main.title} in each round"
    if courses:
        yield CURVES_NAME, partial(_curves, report, courses), "Learning curves"


def _chart(report: Report) -> "Draw":
    from pipeline.report import chart

    return partial(chart.draw, report)


def _pairs(report: Report) -> "Draw":
    from pipeline.report import pairs

    return partial(pairs.draw, report)


def _curves(report: Report, courses: "list[Course]") -> "Draw":
    from pipeline.report import curves

    best = next((index for index, course in enumerate(courses) if course.trial == report.main.trial), None)
    return partial(curves.draw, courses, title=report.name, best=best)


def _drawn(draw: "Draw", path: Path, *, label: str) -> str:
    """Save a picture as PNG and return it as SVG."""
    from pipeline.report import picture

    picture.save_png(draw, path)
    return picture.inline(draw, name=path.stem, label=label)


def _courses(report: Report, events: Iterable[AnyEvent]) -> "list[Course]":
    """Return the courses to draw: that of the training, or those of all trials of a comparison."""
    from pipeline.report.courses import courses

    main = report.main.trial
    return [course for course in courses(events) if report.is_comparison or course.trial == main]


def _save_pairs(report: Report, folder: Path) -> None:
    from pipeline.report import pairs

    (folder / PAIRS_NAME).write_text(pairs.table(report), encoding="utf-8")


def _save_page(report: Report, path: Path, *, about: About, pictures: dict[str, str], courses: "list[Course]") -> None:
    from pipeline.report import curves
    from pipeline.report.html import Pictures, save_page

    drawn = Pictures(
        curves=pictures.get(CURVES_NAME, ""),
        curves_caption=curves.caption(courses) if CURVES_NAME in pictures else "",
        chart=pictures.get(CHART_NAME, ""),
        pairs=pictures.get(PAIRS_CHART_NAME, ""),
    )
    save_page(report, path, about=about, pictures=drawn)


def _table(report: Report) -> str:
    """Return the table in the JSON format of MLflow's ``log_table``."""
    table = report.table()
    return json.dumps({"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]})
