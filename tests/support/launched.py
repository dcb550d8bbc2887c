"""One session of each launcher, whose trials many tests look at."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from command import REPOSITORY
from leaks import State

from pipeline import registry
from pipeline.drive.recorded_run import open_trial
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.launch.base import Session
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Metrics, Outcome
from pipeline.protocol.trial import Trial
from pipeline.record import journal
from pipeline.record.recorder import Recorder

EACH_STEP = "train.log_every_steps=1"


class Launched(NamedTuple):
    """What one session of a launcher left behind: the journal, and the outcome of each trial."""

    folder: Path
    events: dict[str, list[AnyEvent]]
    outcomes: dict[str, Outcome]
    leaks: list[str]


@pytest.fixture(scope="session")
def launched(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launched]:
    """One session for each launcher, whose trials many tests look at: starting workers takes most of the time."""

    @cache
    def run(name: str) -> Launched:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            patch.syspath_prepend(project)
            patch.delenv("RAY_ADDRESS", raising=False)
            return _launched(name, tmp_path_factory.mktemp(name))

    return run


def _launched(name: str, folder: Path) -> Launched:
    launcher = registry.load("launchers", name).Launcher
    trials = list(_trials(name, workers=2 if launcher.many_processes else 1))
    recorder = Recorder(folder, subscribers=[])
    session = Session(folder=folder, receive=recorder.receive, parallel=trials[0].experiment.parallel)
    outcomes: dict[str, Outcome] = {}
    before = State.now()
    with closing(recorder), launcher.preparing(trials[0].experiment), launcher(session) as ready:
        for trial in trials:
            open_trial(trial, recorder)
            outcomes[trial.name] = ready.launch(trial)
    leaks = before.leaks()
    events: dict[str, list[AnyEvent]] = {trial.name: [] for trial in trials}
    for event in journal.read(folder / journal.FILE_NAME):
        events.setdefault(event.trial, []).append(event)  # a node's load belongs to no trial
    return Launched(folder, events, outcomes, leaks)


def _trials(launcher: str, *, workers: int) -> Iterator[Trial]:
    """A training that must be equal, then one that must fail."""
    mlp, lab = REPOSITORY / "experiments" / "mlp.yaml", Path("lab.yaml")
    yield _trial(mlp, "fp64", launcher, workers=workers, more=["train.precision=fp64", "train.epochs=2", EACH_STEP])
    yield _trial(lab, "raises", launcher, workers=workers, more=["model.fault=raises", f"model.rank={workers - 1}"])


def _trial(path: Path, name: str, launcher: str, *, workers: int, more: list[str]) -> Trial:
    overrides = ["parallel.strategy=ddp", f"parallel.launcher={launcher}", f"parallel.workers={workers}", *more]
    resources = Resources(cpus=2, memory_mb=4096)
    plan = make_plan(load(path, overrides).experiment, resources, allowed=allowed_packages(), with_baseline=False)
    return plan.main.model_copy(update={"name": name, "cpus_per_worker": 1})


EXACT = 1e-12  # Rounding in fp64 stays far below it

Curves = dict[str, dict[int, float]]


def curves(events: Iterable[AnyEvent]) -> Curves:
    """Losses and validation metrics by step."""
    found: Curves = {}
    for event in events:
        for point in event.points if isinstance(event, Metrics) else ():
            if point.name == "train/loss" or point.name.startswith("validation/"):
                found.setdefault(point.name, {})[point.step] = point.value
    return found


def assert_same(one: Curves, other: Curves, *, tolerance: float) -> None:
    assert one.keys() == other.keys() == {"train/loss", "validation/loss", "validation/accuracy"}
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=0, abs=tolerance)
