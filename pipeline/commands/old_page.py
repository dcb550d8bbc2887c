"""The files of a report with what its run's folder knows: learning curves, and the facts of its page.

A run that has ended gets the same page from the same folder.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from pipeline.record import journal
from pipeline.record.folder import ENVIRONMENT_NAME, EXPERIMENT_NAME
from pipeline.report.numbers.courses import Course, courses
from pipeline.report.page import publish
from pipeline.report.page.about import About
from pipeline.report.report_files import AnyReport
from pipeline.tracking.outcome import TrackingOutcome
from pipeline.tracking.store import is_server, run_page, ui_address

_PACKAGES = ("ddp-pipeline", "torch", "torchmetrics", "ray", "mlflow", "numpy")


def save(report: AnyReport, folder: Path, *, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Write a report into its run's folder; return the names of the files.

    Args:
        report: the report.
        folder: the run's folder.
        warn: gets a message for each picture or page that can't be written.
    """
    return publish.save(
        report, folder, warn=warn, courses=lambda: list(_courses(report, folder)), about=lambda: about(folder)
    )


def _courses(report: AnyReport, folder: Path) -> Iterator[Course]:
    """Yield the courses to draw: of the training, or of all trials of a comparison."""
    for course in courses(journal.read(folder / journal.FILE_NAME)):
        if report.is_comparison or course.trial == report.main.trial:
            yield course


def about(folder: Path) -> About:
    """Return the facts that a run's folder holds."""
    opened = journal.opened(folder / journal.FILE_NAME)
    if opened is None:
        return About()
    known = TrackingOutcome.read(folder)
    uri = (known.uri if known else "") or opened.tracking_uri
    has_run = known is not None and known.run_id
    return About(
        run=opened.run,
        began=datetime.fromtimestamp(opened.time),
        command=opened.command,
        link=run_page(ui_address(uri), known.experiment_id, known.run_id) if known and has_run else "",
        needs_ui=not is_server(uri),
        store=f"experiment {opened.tracking_experiment} in {uri}",
        versions=(*_code(opened.tags), *_versions(_text(folder / ENVIRONMENT_NAME))),
        experiment=_text(folder / EXPERIMENT_NAME),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _code(tags: Mapping[str, str]) -> Iterator[str]:
    """Yield the commit of the user's code, if it was known."""
    if commit := tags.get("git_commit"):
        yield f"commit {commit[:12]}{', with changes' if tags.get('git_dirty') == 'true' else ''}"


def _versions(environment: str) -> Iterator[str]:
    """Yield the versions of Python, the system and the main packages from the text of environment.txt."""
    first, *packages = environment.splitlines() or [""]
    if first:
        yield first.removeprefix("# ")
    installed = dict(line.split("==", 1) for line in packages if "==" in line)
    yield from (f"{name} {installed[name]}" for name in _PACKAGES if name in installed)
