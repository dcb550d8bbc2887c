"""The page that each run ends with: its curves are from losses.npy, its facts from the run's folder; it may fail."""

# promise: the report's page: each run gets it, curves, no overlap, contrast, colors for color-blind readers

import html
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import JOURNALS

from pipeline.record import journal
from pipeline.results import page as pages
from pipeline.results import record
from pipeline.results.page import FILE_NAME, Course

Play = Callable[..., Any]
PLAYED = {
    "finished": ("run", "tiny.yaml"),
    "single": ("run", "tiny.yaml", "parallel.strategy=single", "parallel.workers=1"),
    "comparison": ("benchmark", "tiny.yaml", "--strategies", "single,ddp", "--workers", "1,2", "--repeats", "2"),
}
MOST_BYTES = 400_000


def run_in(lab: Path) -> Path:
    (folder,) = (lab / "runs").iterdir()
    return folder


@pytest.mark.parametrize("name", PLAYED)
def test_each_run_gets_a_page_that_knows_it(play: Play, lab: Path, name: str) -> None:
    ended = play(name, *PLAYED[name])
    assert ended.code == 0, ended.stderr
    page, result = (run_in(lab) / FILE_NAME).read_text(encoding="utf-8"), record.read(run_in(lab))
    assert result is not None
    for fact in (
        run_in(lab).name,
        f"torch {version(run_in(lab), 'torch')}",
        "experiment tiny in sqlite:///",
        result.title,
    ):
        assert fact in page
    assert "<pre>name: tiny" in page
    assert all(sentence in html.unescape(page) for sentence in result.headline)
    assert page.count("<svg ") >= (name != "single")  # these recordings have no losses.npy
    assert "Learning curves" not in page
    assert len(page) < MOST_BYTES
    assert not list(run_in(lab).glob("*.png"))


def version(folder: Path, package: str) -> str:
    lines = (folder / "environment.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def with_losses(lab: Path) -> tuple[str, list[float]]:
    """A copy of a recording whose workers report the loss of each step, of which it has the curve; and the losses."""
    folder, losses = lab / "recorded", list[float]()
    shutil.copytree(JOURNALS / "finished", folder)
    lines = []
    for line in (folder / journal.FILE_NAME).read_text().splitlines():
        event = json.loads(line)
        own = [value for name, _, value in event.get("points", ()) if name == "train/loss"]
        if event["trial"] == "main" and own:
            event |= {"losses": own, "steps": len(own)}
            losses += own
        lines.append(json.dumps(event))
    (folder / journal.FILE_NAME).write_text("\n".join([*lines, ""]))
    return str(folder), losses


def test_the_curves_are_the_losses_of_all_steps(play: Play, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def iter_figures(result: record.Result, courses: Sequence[Course] = ()) -> Iterator[tuple[str, str, str]]:
        drawn.extend(courses)
        yield from known(result, courses)

    known, drawn = pages.iter_figures, list[Course]()
    monkeypatch.setattr(pages, "iter_figures", iter_figures)
    recorded, losses = with_losses(lab)
    ended = play(recorded, "run", "tiny.yaml")

    assert ended.code == 0, ended.stderr
    (course,) = drawn
    assert len(losses) == 46
    assert np.load(run_in(lab) / "losses.npy").tolist() == list(course.losses) == losses
    assert course.validation["validation/accuracy"][0] == [23, 46]
    page = (run_in(lab) / FILE_NAME).read_text(encoding="utf-8")
    assert page.count("<svg ") == 3
    for text in ("Learning curves", ">Loss<", ">training, smoothed<", ">validation/accuracy<"):
        assert text in page
    assert "src=" not in page
    assert len(page) < MOST_BYTES


def test_a_page_that_cannot_be_drawn_costs_itself_and_a_line(
    play: Play, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "iter_figures", lambda *_: 1 / 0)
    ended = play("finished", "run", "tiny.yaml")

    assert ended.code == 0, ended.stderr
    assert f"runs/{run_in(lab).name}/{FILE_NAME} could not be written: ZeroDivisionError" in ended.stderr
    assert not (run_in(lab) / FILE_NAME).exists()
    result = record.read(run_in(lab))
    assert result is not None
    assert result.headline[0] in " ".join(ended.stdout.split())
    assert dict(result.places)["Folder"] == f"runs/{run_in(lab).name}"


def test_a_report_that_cannot_be_made_costs_no_training(play: Play, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.commands.run.report", lambda *_, **__: 1 / 0)
    ended = play("finished", "run", "tiny.yaml")
    assert (ended.code, record.read(run_in(lab))) == (0, None)
    assert "the report could not be made: ZeroDivisionError" in ended.stderr
