"""torch.compile with several processes: each strategy trains what it trains without. Compiling takes its time."""

# promise: torch.compile, EMA

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_trainings import Written, events_of, lab_trial
from ranks import on_ranks

from pipeline.protocol.events import Finished, Metrics
from pipeline.protocol.rank import Rank
from pipeline.training.measuring import probe
from pipeline.worker import main

pytestmark = pytest.mark.timeout(900)

MODEL = "model={_target_: pipeline.models.MLP, in_features: 4, hidden: [16, 16, 16], num_classes: 3}"
COMPILED, RECOMPUTED = "train.compile=true", "train.activation_checkpointing=true"
TRAININGS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "plain": ("ddp", {}, []),
    "ddp": ("ddp", {}, [COMPILED]),
    "recomputed": ("ddp", {}, [COMPILED, RECOMPUTED]),
    "several buckets, accumulation": (
        "ddp",
        {"bucket_cap_mb": 1},
        [COMPILED, "train.gradient_accumulation=2"],
    ),
    "fsdp": ("fsdp", {"groups": "Linear"}, [COMPILED]),
    "fsdp, recomputed": ("fsdp", {"groups": "Linear"}, [COMPILED, RECOMPUTED]),
}


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("compiled")
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    # Where a step's time goes is measured behind each training; once is enough here.
    probe.SLOT_SECONDS, probe.ROUNDS, probe.FEWEST_ROUNDS = 0.0, 1, 1
    for name, (strategy, options, overrides) in TRAININGS.items():
        trial = lab_trial(["train.precision=fp64", MODEL, *overrides], strategy=strategy, name=name, options=options)
        main.run(trial.model_copy(update={"workers": 2}), rank=where, outbox=Written(folder / f"{name}.{where.rank}"))


def losses(root: Path, name: str, metric: str = "train/loss") -> list[float]:
    return [point.value for event in events_of(root, name, Metrics) for point in event.points if point.name == metric]


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "plain"])
def test_losses_are_those_without(root: Path, name: str) -> None:
    for metric in ("train/loss", "validation/loss"):
        assert losses(root, name, metric) == pytest.approx(losses(root, "plain", metric), abs=1e-12)
    (end,) = events_of(root, name, Finished)
    assert end.result.compile_s > 0
