"""A sweep of the command, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient

from pipeline.protocol.events import AnyEvent, Metrics
from pipeline.record import journal
from pipeline.results.record import Result, read

INPROCESS = ("parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1")


class Folder(NamedTuple):
    """Where a sweep runs, and what it leaves there."""

    path: Path

    @property
    def sweep(self) -> Path:
        (folder,) = (self.path / "runs").iterdir()
        return folder

    @property
    def trials(self) -> list[Path]:
        return sorted(self.sweep.glob("trial-*"))

    def events(self, number: int) -> list[AnyEvent]:
        return list(journal.read(self.sweep / f"trial-{number:03}" / journal.FILE_NAME))

    def of(self, number: int, kind: Any) -> list[Any]:
        return [event for event in self.events(number) if isinstance(event, kind)]

    def epochs(self, number: int) -> list[int]:
        """In which the trial was evaluated."""
        path = self.sweep / f"trial-{number:03}" / journal.FILE_NAME
        metrics = self.of(number, Metrics) if path.exists() else []
        return [event.epoch for event in metrics if any(point.name == "validation/loss" for point in event.points)]

    @property
    def result(self) -> Result:
        found = read(self.sweep)
        assert found is not None
        return found

    @property
    def states(self) -> dict[int, str]:
        """How the trials ended, by number."""
        rows = sorted(self.result.tables[0].rows, key=lambda row: int(str(row[0])))
        return {int(str(row[0])): str(row[3]) for row in rows}

    @property
    def values(self) -> list[Any]:
        """Values of the trials that were started, in order."""
        return [json.loads((trial / "trial.json").read_text())["values"] for trial in self.trials]

    @property
    def best(self) -> int:
        fact = self.result.fact("best_trial")
        return int(fact.value or 0) if fact else 0

    @property
    def children(self) -> dict[str, Any]:
        """MLflow's runs of the trials by run id of ours, and the sweep's own under "sweep"."""
        client = MlflowClient(f"sqlite:///{self.path}/mlflow.db")
        runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
        return {run.data.tags["pipeline.run"].rpartition("/")[2]: run for run in runs}


def section(**parts: object) -> str:
    """An override that gives the file a sweep; JSON is YAML."""
    return f"sweep={json.dumps(parts)}"
