"""Trainings of tests/project/lab.yaml by the ranks of `ranks.on_ranks`: their trials, events and files."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline import worker as main
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.protocol.events import AnyEvent, Event, Failed, event_from_json, event_to_json
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.train.manifest import folder_name

Kind = TypeVar("Kind", bound=Event)


def lab_trial(
    overrides: Sequence[str], *, strategy: str, name: str = "main", options: dict[str, Any] | None = None
) -> Trial:
    """Return a training of the project's experiment that measures nothing afterwards."""
    return Training(
        name=name, experiment=load("lab.yaml", list(overrides)).experiment, strategy=strategy, options=options or {},
        launcher="inprocess", workers=1, devices_per_worker=0, device="cpu", cpus_per_worker=1,
        allowed=allowed_packages(), train_only=True,
    )  # fmt: skip


def saved_in(folder: Path, trial: Trial, *, stopped: str = "", steps: int = 0) -> Trial:
    """Give a trial a folder for its checkpoints; it continues from step ``steps`` of the trial ``stopped``."""
    if stopped:
        (folder / trial.name).mkdir()
        for step in range(1, steps + 1):
            shutil.copytree(folder / stopped / folder_name(step), folder / trial.name / folder_name(step))
    return trial.model_copy(update={"checkpoints": str(folder / trial.name), "resume": bool(stopped)})


class Written:
    """An outbox that appends events to PATH.jsonl and copies files to PATH.NAME."""

    stop_asked = False

    def __init__(self, path: Path | str) -> None:
        self._path = path

    def event(self, event: AnyEvent) -> None:
        assert not isinstance(event, Failed), event.traceback or event.error
        with Path(f"{self._path}.jsonl").open("ab") as file:
            file.write(event_to_json(event) + b"\n")

    def file(self, path: Path, name: str) -> None:
        shutil.copyfile(path, f"{self._path}.{Path(name).name}")


def train_rank(trial: Trial, rank: Rank) -> None:
    """Train a trial of `saved_in`; what a rank sends ends up beside the folder of the checkpoints."""
    main.run(trial, rank=rank, outbox=Written(f"{trial.checkpoints}.{rank.rank}"))


def events_of(root: Path, name: str, kind: type[Kind]) -> list[Kind]:
    """Return the events of a kind that rank 0 of a trial has sent; `Event` for all."""
    lines = (root / f"{name}.0.jsonl").read_text().splitlines()
    return [event for event in map(event_from_json, lines) if isinstance(event, kind)]
