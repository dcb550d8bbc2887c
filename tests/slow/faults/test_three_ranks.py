"""Three ranks, the least whose sums depend on the order of adding: with all that draws random numbers switched on."""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from attempts import ranks_of
from job import Recording

from pipeline import registry
from pipeline.drive.execute import execute
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.launch.base import Session
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Metrics, Resumed
from pipeline.record.recorder import Recorder

pytestmark = pytest.mark.timeout(600)

STEPS = 24
OVERRIDES = [
    "parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=3", "parallel.max_failures=3",
    "model._target_=lab.Patient", "model.ms=10", "data={_target_: lab.augmented}", "loader.num_workers=1",
    "train.epochs=6", "train.gradient_accumulation=2", "train.clip_grad_norm=0.5",
    "optimizer={_target_: torch.optim.AdamW, lr: 0.01}",
    "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, total_steps: '${total_steps}'}",
]  # fmt: skip


class Killer:
    """Forwards events, and kills a worker at the first report from a step on: short steps are reported together."""

    def __init__(self, recorder: Recorder, moments: Sequence[int], draw: random.Random) -> None:
        self._recorder = recorder
        self._moments = list(moments)
        self._draw = draw

    def receive(self, event: AnyEvent, *line: bytes) -> None:
        self._recorder.receive(event, *line)
        if self._moments and isinstance(event, Metrics) and event.step >= self._moments[0]:
            self._moments.pop(0)
            self._draw.choice(self._workers()).kill()

    @staticmethod
    def _workers() -> list[psutil.Process]:
        """The ranks, without their loader processes."""
        return ranks_of(psutil.Process())


@pytest.fixture
def train(
    project: Path, tmp_path: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recording]:
    """Train with workers killed after some steps; returns the journal. There may be more ranks than cores."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)

    def run(name: str, *moments: int, every: int = 1) -> Recording:
        folder = tmp_path / name
        folder.mkdir()
        file = load("lab.yaml", [*OVERRIDES, f"checkpoint.every_steps={every}"])
        plan = make_plan(
            file.experiment, Resources(cpus=3, memory_mb=4096), allowed=allowed_packages(), with_baseline=False
        )
        trial = plan.main.model_copy(update={"checkpoints": str(folder / "checkpoints")})
        with closing(Recorder(folder, subscribers=[])) as recorder:
            killer = Killer(recorder, moments, draw)
            session = Session(folder=folder, receive=killer.receive, parallel=file.experiment.parallel)
            with registry.load("launchers", "torchrun").Launcher(session) as launcher:
                execute(trial, launcher=launcher, recorder=recorder, file=file)
        return Recording(folder)

    return run


def test_killed_ranks_leave_no_trace(train: Callable[..., Recording], draw: random.Random) -> None:
    whole = train("whole")
    killed = train("killed", *sorted(draw.sample(range(6, STEPS - 1), 2)), every=draw.randint(1, 3))

    assert [step for step, _ in whole.losses] == list(range(1, STEPS + 1))
    assert len(killed.all_of(Resumed)) == 2
    for name in ("train/loss", "train/gradient_norm", "train/learning_rate", "validation/loss"):
        assert killed.series(name) == whole.series(name)
