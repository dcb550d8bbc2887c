"""Parts of a step beside the truth: data, model and optimizer sleep for known times, with and without loader processes.

    python benchmarks/data_wait.py        # two minutes on an idle machine

A loader process that takes L ms for a batch delivers one each L ms, N of them one each L / N: steps that compute for
less wait for the rest. Each part is to be within 10% of that, or within 3 ms.
"""

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))  # of the loader processes, too

from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import StepParts
from pipeline.train.run import train

STEPS, BATCH, LOG_EVERY = 40, 4, 10
OPTIMIZER_MS = 20.0
RELATIVE, ABSOLUTE_MS = 0.1, 3.0
"""How far a part may be off: the larger of the two."""


class Case(NamedTuple):
    """One row of the table."""

    loaders: int
    load_ms: float
    """For a batch."""
    compute_ms: float
    prefetch: int = 2

    @property
    def wait_ms(self) -> float:
        """What a step waits for its batch in the steady state."""
        if not self.loaders:
            return self.load_ms
        return max(0.0, self.load_ms / self.loaders - self.compute_ms - OPTIMIZER_MS)


CASES = (
    Case(0, 100, 200),
    Case(1, 100, 200),
    Case(1, 250, 180),
    Case(1, 400, 180),
    Case(2, 300, 180),
    Case(2, 400, 130),
    Case(2, 400, 130, prefetch=8),
)


class SlowSamples(Dataset[Any]):
    """Samples of zeros that take a while to read."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.ms / 1000)
        return torch.zeros(3), torch.zeros(1)


def slow_samples(ms: float) -> tuple[Dataset[Any], None]:
    """Nothing to validate on."""
    return SlowSamples(ms), None


class SlowModel(nn.Module):
    """A forward pass that takes a while."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layer, self.ms = nn.Linear(3, 1), ms

    def forward(self, inputs: Tensor) -> Tensor:
        """Shapes (batch, 3) and (batch, 1)."""
        time.sleep(self.ms / 1000)
        outputs: Tensor = self.layer(inputs)
        return outputs


class SlowSGD(torch.optim.SGD):
    """Updates that take a while."""

    def step(self, closure: Any = None) -> Any:
        """As SGD's."""
        time.sleep(OPTIMIZER_MS / 1000)
        return super().step(closure)


class Silent:
    """An outbox of a training that nobody watches."""

    stop_asked = False

    def event(self, event: object) -> None:
        """Nobody listens."""

    def file(self, path: Path, name: str) -> None:
        """Nobody listens."""


def measured(case: Case) -> tuple[float, StepParts]:
    """The step of a training and its parts, in milliseconds."""
    experiment = Experiment.model_validate(
        {
            "name": "data-wait",
            "model": {"_target_": "data_wait.SlowModel", "ms": case.compute_ms},
            "data": {"_target_": "data_wait.slow_samples", "ms": case.load_ms / BATCH},
            "loss": {"_target_": "torch.nn.MSELoss"},
            "optimizer": {"_target_": "data_wait.SlowSGD", "lr": 0.1},
            "train": {"epochs": 1, "global_batch_size": BATCH, "log_every_steps": LOG_EVERY},
            "loader": {"num_workers": case.loaders, **({"prefetch_factor": case.prefetch} if case.loaders else {})},
            "tracking": {"log_model": False},
        }
    )
    trial = Training(
        name="main", experiment=experiment, strategy="single", launcher="inprocess", workers=1,
        devices_per_worker=0, device="cpu", cpus_per_worker=1, allowed=(*BUILT_IN, "data_wait"),
    )  # fmt: skip
    result = train(trial, rank=Rank(), outbox=Silent())
    return result.step_ms.median, result.parts


def cell(value: float, truth: float) -> str:
    """A measured part, marked if it is off."""
    off = abs(value - truth) > max(RELATIVE * truth, ABSOLUTE_MS)
    return f"{value:.1f}{' (!)' if off else ''}"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| loaders | load / compute / optimizer | wait: truth | told | compute | optimizer, other | parts / step |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for case in CASES:
        step_ms, parts = measured(case)
        loaders = f"{case.loaders}, prefetch {case.prefetch}" if case.prefetch != 2 else str(case.loaders)
        times = f"{case.load_ms:.0f} / {case.compute_ms:.0f} / {OPTIMIZER_MS:.0f}"
        figures = (
            cell(parts.data_wait_ms, case.wait_ms),
            cell(parts.compute_ms or 0.0, case.compute_ms),
            cell(parts.rest_ms or 0.0, OPTIMIZER_MS),
        )
        print(
            f"| {loaders} | {times} | {case.wait_ms:.0f} | {' | '.join(figures)} | {parts.sum_ms / step_ms:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
