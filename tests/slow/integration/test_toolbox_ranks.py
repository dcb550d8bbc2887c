"""EMA, activation checkpointing and torch.compile in two processes, all of them started once. Compiling takes its time.

`contract/test_by_hand.py` compares averages with those of a loop by hand.
"""

# promise: torch.compile, EMA

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import until
from ranks import Ranks

from pipeline.experiment.load import load
from pipeline.protocol.events import Resumed
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.train.ranks import barrier

pytestmark = pytest.mark.timeout(900)

STOPPED, STEPS = 5, 8
EMA = ["train.ema={decay: 0.7, start_step: 2}", "optimizer._target_=torch.optim.AdamW"]
MLP = "model={{_target_: pipeline.models.MLP, in_features: 4, hidden: [16, 16, 16], num_classes: 3, dropout: {}}}"
BLOCKS, DROPOUT = [MLP.format(0.0)], [MLP.format(0.3), "train.precision=fp32"]
COMPILED, RECOMPUTED = "train.compile=true", "train.activation_checkpointing=true"
OF_LINEAR: dict[str, Any] = {"strategy": "fsdp", "options": {"groups": "Linear"}}
TRAININGS: dict[str, dict[str, Any]] = {
    "ema, ddp": {"overrides": EMA},
    "ema, fsdp": {"overrides": EMA, "strategy": "fsdp"},
    "ema, fsdp again": {"overrides": EMA, "strategy": "fsdp", "stopped": "ema, fsdp"},
    "dropout, ddp": {"overrides": DROPOUT},
    "recomputed, ddp": {"overrides": [*DROPOUT, RECOMPUTED]},
    "dropout, fsdp": {"overrides": DROPOUT, **OF_LINEAR},
    "recomputed, fsdp": {"overrides": [*DROPOUT, RECOMPUTED], **OF_LINEAR},
    "plain": {"overrides": BLOCKS},
    "compiled, ddp": {"overrides": [*BLOCKS, COMPILED]},
    "compiled, recomputed, ddp": {"overrides": [*BLOCKS, COMPILED, RECOMPUTED]},
    "compiled, several buckets, accumulation": {
        "overrides": [*BLOCKS, COMPILED, "train.gradient_accumulation=2"], "options": {"bucket_cap_mb": 1}
    },
    "compiled, fsdp": {"overrides": [*BLOCKS, COMPILED], **OF_LINEAR},
    "compiled, recomputed, fsdp": {"overrides": [*BLOCKS, COMPILED, RECOMPUTED], **OF_LINEAR},
}  # fmt: skip


Trainings = dict[str, tuple[TrialResult, toys.Kept]]


@pytest.fixture(scope="module")
def trainings(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Results of rank 0, and what it has sent."""
    with pytest.MonkeyPatch.context() as patch, Ranks(2, timeout_s=300) as ranks:
        patch.chdir(project)
        patch.syspath_prepend(project)
        return dict(ranks.call(_in_two_processes, tmp_path_factory.mktemp("toolbox"))[0])


def _in_two_processes(rank: Rank, folder: Path) -> Trainings:
    shared = ["checkpoint.every_steps=1", "checkpoint.keep=100", "train.precision=fp64"]
    found = {}
    for name, how in TRAININGS.items():
        options = {"strategy": "ddp", "workers": 2, **how}
        overrides, stopped = [*shared, *options.pop("overrides")], options.pop("stopped", "")
        if stopped and rank.is_first:
            until(STOPPED, folder=folder / stopped, to=folder / name)
        barrier(rank)
        options |= {"experiment": load("lab.yaml", overrides).experiment, "checkpoints": str(folder / name)}
        found[name] = toys.trained(rank=rank, resume=bool(stopped), **options)
    return found


def series(kept: toys.Kept, metric: str) -> dict[int, float]:
    return {point.step: point.value for point in kept.points(metric)}


def test_sharded_averages_go_on_to_the_bit(trainings: Trainings) -> None:
    (_, whole), (_, again) = trainings["ema, fsdp"], trainings["ema, fsdp again"]
    assert [event.step for event in again.events if isinstance(event, Resumed)] == [STOPPED]
    assert series(again, "validation/loss")[STEPS] == series(whole, "validation/loss")[STEPS]
    torch.testing.assert_close(again.weights, whole.weights, rtol=0, atol=0)


def test_each_rank_of_fsdp_holds_its_part_of_the_averages(trainings: Trainings) -> None:
    """As much as of the parameters: AdamW's state is twice that, gradients as much."""
    (ddp, whole), (fsdp, sharded) = trainings["ema, ddp"], trainings["ema, fsdp"]
    assert ddp.held is not None
    assert fsdp.held is not None
    assert sum(fsdp.held.mb) == pytest.approx(ddp.held.mb[0], rel=0.1)
    torch.testing.assert_close(sharded.weights, whole.weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_training_is_the_same_to_the_bit(trainings: Trainings, strategy: str) -> None:
    one, other = (trainings[f"{name}, {strategy}"][1] for name in ("dropout", "recomputed"))
    assert series(one, "train/loss") == series(other, "train/loss")
    torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in TRAININGS if name.startswith("compiled")])
def test_losses_of_compiled_trainings_are_those_without(trainings: Trainings, name: str) -> None:
    result, kept = trainings[name]
    for metric in ("train/loss", "validation/loss"):
        assert series(kept, metric) == pytest.approx(series(trainings["plain"][1], metric), abs=1e-12)
    assert result.compile_s > 0
