"""EMA and activation checkpointing in two processes, all of them started once."""

# promise: torch.compile, EMA

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_trainings import events_of, lab_trial, saved_in, train_rank
from ranks import on_ranks

from pipeline.protocol.events import (
    Finished,
    Metrics,
    Resumed,
)
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.measuring import probe
from pipeline.training.ranks.collectives import from_first

STOPPED, STEPS = 5, 8
EMA = ["train.ema={decay: 0.7, start_step: 2}", "optimizer._target_=torch.optim.AdamW"]
BLOCKS = ["model={_target_: pipeline.models.MLP, in_features: 4, hidden: [16, 16, 16], num_classes: 3, dropout: 0.3}"]
RECOMPUTED = [*BLOCKS, "train.activation_checkpointing=true"]
ROUNDED = 1e-12

Weights = dict[str, torch.Tensor]


def _trainings() -> dict[str, dict[str, Any]]:
    linear = {"strategy": "fsdp", "options": {"groups": "Linear"}}
    return {
        "ema, ddp": {"overrides": EMA},
        "ema, fsdp": {"overrides": EMA, "strategy": "fsdp"},
        "ema, fsdp again": {"overrides": EMA, "strategy": "fsdp", "stopped": "ema, fsdp"},
        "plain, ddp": {"overrides": BLOCKS, "precision": "fp32"},
        "recomputed, ddp": {"overrides": RECOMPUTED, "precision": "fp32"},
        "plain, fsdp": {"overrides": BLOCKS, "precision": "fp32", **linear},
        "recomputed, fsdp": {"overrides": RECOMPUTED, "precision": "fp32", **linear},
    }


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("toolbox")
        train_rank(_trial(folder, "ema, single", overrides=EMA, strategy="single"), Rank())
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    # Where a step's time goes is measured behind each training; once is enough here.
    probe.SLOT_SECONDS, probe.ROUNDS, probe.FEWEST_ROUNDS = 0.0, 1, 1
    for name, more in _trainings().items():
        train_rank(from_first(lambda: _trial(folder, name, **more), rank=where), where)  # noqa: B023


def _trial(
    folder: Path,
    name: str,
    *,
    overrides: list[str],
    options: dict[str, Any] | None = None,
    strategy: str = "ddp",
    precision: str = "fp64",
    stopped: str = "",
) -> Trial:
    """A trial with a checkpoint of each step; it goes on from what another one has left if that is given."""
    shared = ["checkpoint.every_steps=1", "checkpoint.keep=100", f"train.precision={precision}"]
    trial = lab_trial([*shared, *overrides], strategy=strategy, name=name, options=options)
    return saved_in(folder, trial, stopped=stopped, steps=STOPPED)


def series(root: Path, name: str, metric: str, *, after: int = 0) -> dict[int, float]:
    points = [point for event in events_of(root, name, Metrics) for point in event.points if point.name == metric]
    return {point.step: point.value for point in points if point.step > after}


def weights(root: Path, name: str) -> Weights:
    loaded: Weights = torch.load(root / f"{name}.0.weights.pt", weights_only=True)
    return loaded


def farthest(one: dict[int, float], other: dict[int, float]) -> float:
    assert list(one) == list(other)
    return max(abs(one[step] - other[step]) for step in one)


# EMA


@pytest.mark.parametrize("name", ["ema, ddp", "ema, fsdp"])
def test_averages_are_those_of_one_process(root: Path, name: str) -> None:
    for metric in ("train/loss", "validation/loss"):
        assert farthest(series(root, name, metric), series(root, "ema, single", metric)) <= ROUNDED
    for key, own in weights(root, "ema, single").items():
        torch.testing.assert_close(weights(root, name)[key], own, rtol=ROUNDED, atol=ROUNDED)


def test_sharded_averages_go_on_to_the_bit(root: Path) -> None:
    assert [event.step for event in events_of(root, "ema, fsdp again", Resumed)] == [STOPPED]
    assert (
        series(root, "ema, fsdp again", "validation/loss")[STEPS]
        == (series(root, "ema, fsdp", "validation/loss")[STEPS])
    )
    for key, own in weights(root, "ema, fsdp").items():
        assert torch.equal(weights(root, "ema, fsdp again")[key], own)


def test_each_rank_of_fsdp_holds_its_part_of_them(root: Path) -> None:
    """As much as of the parameters: AdamW's state is twice that, gradients as much."""
    (ddp,), (fsdp,) = (events_of(root, name, Finished) for name in ("ema, ddp", "ema, fsdp"))
    assert ddp.result.held is not None
    assert fsdp.result.held is not None
    assert sum(fsdp.result.held.mb) == pytest.approx(ddp.result.held.mb[0], rel=0.1)


# Activation checkpointing


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_training_is_the_same_to_the_bit(root: Path, strategy: str) -> None:
    one, other = (f"{name}, {strategy}" for name in ("plain", "recomputed"))
    assert series(root, one, "train/loss") == series(root, other, "train/loss")
    assert all(torch.equal(own, weights(root, other)[name]) for name, own in weights(root, one).items())
