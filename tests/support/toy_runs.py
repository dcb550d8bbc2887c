"""Runs of toys that have ended: trained in this process, with a journal, checkpoints and weights in their folder."""

from pathlib import Path
from typing import Any

import pytest
import toys
from toys import Kept

from pipeline.drive.recorded_run import _describe
from pipeline.experiment.load import to_yaml
from pipeline.plan.plan import Plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Finished, RunClosed, TrialOpened
from pipeline.protocol.trial import Rank, Status
from pipeline.record import provenance
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.train.run import train

HERE = {"strategy": "single", "launcher": "inprocess", "workers": 1}
T0 = 1_700_000_000.0


class InFolder(Kept):
    """Keeps files in a run's folder, as the driver does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def file(self, path: Path, name: str) -> None:
        (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(path.read_bytes())


def toy_run(
    lab: Path, *, name: str = "20260101-000000-toy-aaaa", status: Status | None = "FINISHED",
    exports: bool = False, **sections: Any,
) -> Path:  # fmt: skip
    """A run in ``lab/runs``, which an experiment file in ``lab`` may continue; no status: its driver was killed."""
    (lab / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["toys", "toy_metrics", "test_export"]\n')
    folder = lab / "runs" / name
    folder.mkdir(parents=True)
    trial = toys.trial(**{"parallel": HERE, **sections}, checkpoints=str(folder / "checkpoints"), exports=exports)
    outbox = InFolder(folder)
    result = train(trial, rank=Rank(), outbox=outbox)
    (folder / "experiment.yaml").write_text(to_yaml(trial.experiment))
    plan = Plan(experiment=trial.experiment, resources=Resources(cpus=2, memory_mb=4096), trials=(trial,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "git", lambda *_, **__: "")  # a process
        opened = _describe(plan, folder, uri=f"sqlite:///{lab}/mlflow.db", member=None)
    opened = opened.model_copy(update={"time": T0, "command": ""})
    begun = TrialOpened(time=T0, role="main", title="single", tags={}, params={})
    events: list[AnyEvent] = [opened, begun, *outbox.events, Finished(time=T0 + 50, result=result)]
    if status is not None:
        message = "" if status == "FINISHED" else "interrupted"
        events.append(RunClosed(time=T0 + 60, status=status, message=message, summary="**the verdict**"))
    journal = Journal(folder / FILE_NAME)
    for event in events:
        journal.append(event)
    journal.close()
    return folder
