"""EMA, activation checkpointing and torch.compile in two processes, all of them started once. Compiling takes its time.

`contract/test_by_hand.py` compares averages with those of a loop by hand.
"""

# promise: torch.compile, EMA

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_trainings import events_of, lab_trial, saved_in, train_rank
from ranks import on_ranks

from pipeline.protocol.events import Finished, Metrics, Resumed
from pipeline.protocol.rank import Rank
from pipeline.train.ranks import broadcast_from_first

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


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("toolbox")
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    shared = ["checkpoint.every_steps=1", "checkpoint.keep=100", "train.precision=fp64"]
    for name, how in TRAININGS.items():
        options = {"strategy": "ddp", **how}
        overrides, stopped = [*shared, *options.pop("overrides")], options.pop("stopped", "")
        trial = lab_trial(overrides, name=name, **options).model_copy(update={"workers": 2})
        placed = broadcast_from_first(lambda: saved_in(folder, trial, stopped=stopped, steps=STOPPED), rank=where)  # noqa: B023
        train_rank(placed, where)


def series(root: Path, name: str, metric: str) -> dict[int, float]:
    points = [point for event in events_of(root, name, Metrics) for point in event.points if point.name == metric]
    return {point.step: point.value for point in points}


def weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(root / f"{name}.0.weights.pt", weights_only=True)
    return loaded


def test_sharded_averages_go_on_to_the_bit(root: Path) -> None:
    whole, again = "ema, fsdp", "ema, fsdp again"
    assert [event.step for event in events_of(root, again, Resumed)] == [STOPPED]
    assert series(root, again, "validation/loss")[STEPS] == series(root, whole, "validation/loss")[STEPS]
    torch.testing.assert_close(weights(root, again), weights(root, whole), rtol=0, atol=0)


def test_each_rank_of_fsdp_holds_its_part_of_the_averages(root: Path) -> None:
    """As much as of the parameters: AdamW's state is twice that, gradients as much."""
    (ddp,), (fsdp,) = (events_of(root, name, Finished) for name in ("ema, ddp", "ema, fsdp"))
    assert ddp.result.held is not None
    assert fsdp.result.held is not None
    assert sum(fsdp.result.held.mb) == pytest.approx(ddp.result.held.mb[0], rel=0.1)
    torch.testing.assert_close(weights(root, "ema, fsdp"), weights(root, "ema, ddp"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_training_is_the_same_to_the_bit(root: Path, strategy: str) -> None:
    one, other = (f"{name}, {strategy}" for name in ("dropout", "recomputed"))
    assert series(root, one, "train/loss") == series(root, other, "train/loss")
    torch.testing.assert_close(weights(root, one), weights(root, other), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in TRAININGS if name.startswith("compiled")])
def test_losses_of_compiled_trainings_are_those_without(root: Path, name: str) -> None:
    for metric in ("train/loss", "validation/loss"):
        assert series(root, name, metric) == pytest.approx(series(root, "plain", metric), abs=1e-12)
    (end,) = events_of(root, name, Finished)
    assert end.result.compile_s > 0
