"""The files of a report in the run's folder: JSON, table, pictures and page."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.report.numbers.records import table_json
from pipeline.report.page.about import About
from pipeline.report.report import Report, comparison_json
from pipeline.report.report_files import CURVES_NAME, PAGE_NAME, PAIRS_NAME, REPORT_NAME, AnyReport
from pipeline.system import uncollected

if TYPE_CHECKING:
    from pipeline.report.numbers.courses import Course

_log = logging.getLogger(__name__)


def save(
    report: AnyReport,
    folder: Path,
    *,
    warn: Callable[[str], None],
    courses: "Callable[[], Sequence[Course]]" = tuple,
    about: Callable[[], About] = About,
) -> tuple[str, ...]:
    """Write pictures and page of a report, and the figures of a `Report`; return the names of the files.

    A picture or page that can't be written doesn't fail the run; ``warn`` gets a message.

    Args:
        report: the report.
        folder: the run's folder.
        warn: gets messages.
        courses: returns the courses of the trainings, for the learning curves.
        about: returns facts about the run.
    """
    names = [*_save_figures(report, folder, warn=warn)] if isinstance(report, Report) else []
    curves: Sequence[Course] = ()
    with _spared(folder / CURVES_NAME, warn):
        curves = courses()
    with _spared(folder / PAGE_NAME, warn), uncollected():
        # Imported here, since the first step shouldn't wait half a second for matplotlib.
        from pipeline.report.page import html
        from pipeline.report.pictures import drawings

        drawn: dict[str, html.Drawn] = {}
        for picture in drawings.pictures(report, curves):
            with _spared(folder / picture.name, warn):
                drawn[picture.name] = html.Drawn(picture.save(folder), picture.label, picture.caption)
                names.append(picture.name)
        html.save_page(report, folder / PAGE_NAME, about=about(), pictures=drawn)
        names.append(PAGE_NAME)
    return tuple(names)


def _save_figures(report: Report, folder: Path, *, warn: Callable[[str], None]) -> Iterator[str]:
    """Write the figures of a report as JSON, table and CSV; yield the names of the files."""
    texts = {REPORT_NAME: report.to_json() + "\n", "speedup_table.json": table_json(report.table())}
    if report.is_comparison:
        texts["comparison.json"] = comparison_json(report) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        yield name
    if report.main.speedup_rounds > 1:
        with _spared(folder / PAIRS_NAME, warn):
            _save_pairs(report, folder)
            yield PAIRS_NAME


@contextmanager
def _spared(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Turn an error inside into a warning: the figures are written, whatever goes wrong with a picture."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        _log.warning("%s could not be written", path, exc_info=error)
        warn(f"{path} could not be written: {type(error).__name__}: {error}")


def _save_pairs(report: Report, folder: Path) -> None:
    from pipeline.report.pictures import pairs

    (folder / PAIRS_NAME).write_text(pairs.table(report), encoding="utf-8")
