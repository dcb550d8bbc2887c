"""The page of a report, made again from a recorded run's folder, and small."""

# promise: the report's page: each earlier run gets it, curves, no overlap, contrast, colors for color-blind readers

from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import Recording

from pipeline.commands import old_page as page
from pipeline.protocol.events import RunOpened
from pipeline.report.report import Report
from pipeline.report.report_files import CURVES_NAME, PAGE_NAME, REPORT_NAME
from pipeline.tracking.outcome import TrackingOutcome

CURVES = {
    "finished": ["Loss", "validation/accuracy", "Throughput, samples/s"],
    "single": ["Loss", "validation/accuracy", "Throughput, samples/s"],
    "nan": ["Loss", "Throughput, samples/s"],
    "elastic": ["Loss", "Throughput, samples/s"],
    "resumed": ["Loss", "Learning rate", "Throughput, samples/s"],
    "comparison": ["Train loss, smoothed"],
}
MOST_BYTES = 400_000


@pytest.mark.parametrize("name", CURVES)
def test_a_run_gets_the_page_of_its_report_again(journal: Callable[[str], Recording], name: str) -> None:
    folder = journal(name).folder
    made = saved(folder)
    (opened, *_) = journal(name).all_of(RunOpened)
    for fact in (opened.run, f"torch {version(folder, 'torch')}", "/#/experiments/", f"name: {opened.params['name']}"):
        assert fact in made
    assert [title for title in CURVES[name] if f">{title}<" not in made] == []
    assert len(made) < MOST_BYTES
    assert saved(folder) == made


def saved(folder: Path) -> str:
    """The page, written by what every command uses."""
    report = Report.model_validate_json((folder / REPORT_NAME).read_bytes())
    names = page.save(report, folder, warn=pytest.fail)
    assert {CURVES_NAME, PAGE_NAME} <= set(names)
    return (folder / PAGE_NAME).read_text(encoding="utf-8")


def version(folder: Path, package: str) -> str:
    lines = (folder / "environment.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def test_a_folder_without_its_files_gets_a_page_without_these_facts(journal: Callable[[str], Recording]) -> None:
    folder = journal("finished").folder
    for name in ("environment.txt", "experiment.yaml", "sync.json"):
        (folder / name).unlink()
    made = saved(folder)
    assert "experiment tiny in sqlite:///" in made
    assert "commit 6a7ec7fffb79" in made
    assert "<pre>" not in made


def test_a_run_that_goes_on_knows_its_place_in_mlflow(journal: Callable[[str], Recording]) -> None:
    folder = journal("finished").folder
    (folder / "sync.json").unlink()
    outcome = TrackingOutcome(experiment_id="7", run_id="5bf9", delivered=False)
    outcome.keep(folder)
    assert page.about(folder).link.partition("?")[0].endswith("/#/experiments/7/runs/5bf9")


def test_a_damaged_journal_costs_the_curves_and_the_facts(journal: Callable[[str], Recording]) -> None:
    folder = journal("finished").folder
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"kind":"started"', '"kind":', 1))
    told: list[str] = []
    report = Report.model_validate_json((folder / REPORT_NAME).read_bytes())
    names = page.save(report, folder, warn=told.append)
    assert PAGE_NAME in names
    assert CURVES_NAME not in names
    assert [message.partition(" could")[0] for message in told] == [str(folder / CURVES_NAME)]
