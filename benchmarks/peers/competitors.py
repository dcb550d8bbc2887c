"""Who takes part, and the command that starts each."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import yaml
from workloads import SEED, WORKLOADS, Workload

from pipeline.protocol.events import Finished, FirstStep, Metrics
from pipeline.record import journal, loss_file

HERE = Path(__file__).parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Result(NamedTuple):
    """What a run wrote down; times in seconds since 1970."""

    first_step: float
    epochs: Sequence[float]
    """When the last step of each epoch was done."""
    losses: Sequence[float]
    """Of every step, the mean over its batch."""
    worker_peak_mb: float
    """Resident memory of the largest worker process."""


class Competitor(Protocol):
    """One way to do the work."""

    name: str
    environment: Mapping[str, str]

    def command(self, workload: str, *, workers: int, folder: Path) -> list[str]:
        """What to start in ``folder``, which is empty but for the store of experiments."""

    def result(self, workload: str, *, folder: Path) -> Result:
        """What came out."""


class Peer:
    """A script of this folder."""

    def __init__(self, name: str, script: str, *, torchrun: bool = False, **environment: str) -> None:
        self.name = name
        self.environment = environment
        self._script, *self._more = script.split()
        self._torchrun = torchrun

    def command(self, workload: str, *, workers: int, folder: Path) -> list[str]:
        """See `Competitor`."""
        starter = [*TORCHRUN, str(workers)] if self._torchrun else []
        asked = ["--workload", workload, "--workers", str(workers), "--out", str(folder / "result.json")]
        return [sys.executable, *starter, str(HERE / self._script), *asked, *self._more]

    def result(self, workload: str, *, folder: Path) -> Result:
        """See `Competitor`."""
        return Result(**json.loads((folder / "result.json").read_text()))


class Ours:
    """``pipeline run``, with journal, terminal and MLflow as users have them."""

    environment = {"PYTHONPATH": str(HERE)}

    def __init__(self, launcher: str, *, tracked: bool = True) -> None:
        self.name = f"pipeline, {launcher}" + ("" if tracked else ", MLflow off")
        self._launcher = launcher
        self._start = ["-m", "pipeline"] if tracked else [str(HERE / "untracked.py")]

    def command(self, workload: str, *, workers: int, folder: Path) -> list[str]:
        """See `Competitor`; writes the experiment and the project that its code belongs to."""
        (folder / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["workloads"]\n')
        (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment(WORKLOADS[workload])))
        asked = [f"parallel.launcher={self._launcher}", f"parallel.workers={workers}"]
        asked.append(f"parallel.strategy={'ddp' if workers > 1 else 'single'}")
        return [sys.executable, *self._start, "run", "experiment.yaml", "--no-baseline", *asked]

    def result(self, workload: str, *, folder: Path) -> Result:
        """See `Competitor`; all of it stands in the journal."""
        (path,) = folder.glob(f"runs/*/{journal.FILE_NAME}")
        events = list(journal.read(path))
        metrics = [event for event in events if isinstance(event, Metrics)]
        losses = loss_file.read(path.parent)
        per_epoch = len(losses) // WORKLOADS[workload].epochs
        ends = {event.step: event.time for event in metrics if any(p.name == "train/loss" for p in event.points)}
        return Result(
            first_step=next(event.time for event in events if isinstance(event, FirstStep)),
            epochs=[ends[step] for step in sorted(ends) if step % per_epoch == 0],
            losses=losses,
            worker_peak_mb=max(next(e for e in events if isinstance(e, Finished)).result.peak_memory_mb),
        )


def experiment(work: Workload) -> dict[str, object]:
    """The experiment file: checkpoints and the export of the model are off, since no peer does the like."""
    return {
        "name": "bench",
        "seed": SEED,
        "model": work.model,
        "data": work.data,
        **({"task": {"_target_": work.task}} if work.task else {"loss": {"_target_": "torch.nn.CrossEntropyLoss"}}),
        "optimizer": work.optimizer,
        "train": {"epochs": work.epochs, "global_batch_size": work.batch},
        "checkpoint": {"keep": 0},
        "loader": {"num_workers": work.loaders},
        "parallel": {"cpus_per_worker": 1},
        "tracking": {"uri": "sqlite:///../mlflow.db", "log_model": False},
    }


BARE = Peer("bare loop", "bare.py")
STOCK = Peer("bare loop, sample by sample", "bare.py --loader stock")
DIRECT = Peer("bare loop, no DataLoader", "bare.py --loader none")
DDP = Peer("bare, torchrun", "ddp.py", torchrun=True)
LIGHTNING = Peer("Lightning", "with_lightning.py")
ACCELERATE = Peer("Accelerate", "with_accelerate.py", torchrun=True, ACCELERATE_USE_CPU="true")
TRANSFORMERS = Peer("transformers Trainer", "with_transformers.py", torchrun=True)
RAY_TRAIN = Peer("Ray Train", "with_ray_train.py")
INPROCESS, OURS_TORCHRUN, OURS_RAY = Ours("inprocess"), Ours("torchrun"), Ours("ray")
UNTRACKED, UNTRACKED_TORCHRUN = Ours("inprocess", tracked=False), Ours("torchrun", tracked=False)

Row = tuple[Competitor, str, int]
"""A competitor, its workload, its workers."""

_EVERYWHERE: dict[int, list[Competitor]] = {
    1: [BARE, INPROCESS, LIGHTNING, ACCELERATE],
    2: [DDP, OURS_TORCHRUN, LIGHTNING, OURS_RAY, ACCELERATE],
}
_OVERHEAD: dict[int, list[Competitor]] = {
    1: [
        *(BARE, INPROCESS, DIRECT, UNTRACKED, LIGHTNING, DDP, OURS_TORCHRUN),
        *(STOCK, OURS_RAY, RAY_TRAIN, ACCELERATE, TRANSFORMERS),
    ],
    2: [DDP, OURS_TORCHRUN, LIGHTNING, UNTRACKED_TORCHRUN, ACCELERATE, OURS_RAY, RAY_TRAIN, TRANSFORMERS],
}
"""On steps that are nearly nothing but overhead, everyone takes part."""
_ORDINARY: dict[int, list[Competitor]] = {
    1: [BARE, INPROCESS, LIGHTNING, ACCELERATE, TRANSFORMERS],
    2: [DDP, OURS_TORCHRUN, OURS_RAY, LIGHTNING, ACCELERATE, TRANSFORMERS],
}
"""On a dataset as people write it, read sample by sample."""
_DRAWING: dict[int, list[Competitor]] = {1: [BARE, INPROCESS]}
"""On what only pipeline does: each sample draws the same numbers at any world size and after a resume."""
_COMPETITORS = {"mlp": _OVERHEAD, "ordinary": _ORDINARY}
_COMPETITORS |= {name: _DRAWING for name in WORKLOADS if name.startswith("drawing")}
_COMPETITORS |= {name: {1: _ORDINARY[1]} for name in ("batched", "dicts", "2 ms", "20 ms", "images")}

REFERENCE = {1: BARE.name, 2: DDP.name}
"""What ratios are relative to, by workers."""


TRACKED = {INPROCESS.name: UNTRACKED.name, OURS_TORCHRUN.name: UNTRACKED_TORCHRUN.name}
"""Ours with MLflow, and the same without, which tell what tracking costs."""


def rows(workloads: Sequence[str], *, everyone: bool = False) -> list[Row]:
    """All rows, ours and others' in turn; ``everyone`` takes part in each workload, not only in the shortest."""
    return [
        (competitor, workload, workers)
        for workload in workloads
        for workers, those in (_OVERHEAD if everyone else _COMPETITORS.get(workload, _EVERYWHERE)).items()
        for competitor in those
    ]
