"""A loss that is divided by something else than samples is the same objective however its batches are dealt.

Held to plain torch on whole global batches, in fp64, for every number of workers and micro-batches and every strategy.
"""

# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: losses weighted by tokens or class weights; other losses are refused

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import weighed
from ranks import on_ranks
from torch import Tensor, nn

from pipeline.config import components
from pipeline.config.schema import Experiment
from pipeline.config.targets import BUILT_IN
from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.tasks import LanguageModel
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluate, full_state_dict
from pipeline.training.model.learned import held_by
from pipeline.training.ranks.randomness import mix
from pipeline.training.step import train_step

TOLERANCE = 1e-12
BATCH, EPOCHS = 8, 1
TAGGER = {"model": {"_target_": "weighed.tagger"}, "data": {"_target_": "weighed.tokens"}}
LINE = {"model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": weighed.CLASSES}}
ENTROPY = "torch.nn.CrossEntropyLoss"
CASES: dict[str, dict[str, Any]] = {
    "padded tokens": TAGGER | {"task": {"_target_": "pipeline.tasks.LanguageModel"}},
    "hardly any tokens": {
        **TAGGER,
        "data": {"_target_": "weighed.tokens", "empty": True},
        "task": {"_target_": "pipeline.tasks.LanguageModel"},
    },
    "class weights": {
        **LINE,
        "data": {"_target_": "weighed.points"},
        "loss": {"_target_": ENTROPY, "weight": {"_target_": "weighed.numbers", "values": [1.0, 5.0, 0.2, 20.0]}},
    },
    "a class that counts nothing": {
        **LINE,
        "data": {"_target_": "weighed.points"},
        "loss": {"_target_": ENTROPY, "weight": {"_target_": "weighed.numbers", "values": [1.0, 0.0, 0.2, 0.0]}},
    },
    "smoothed, with weights": {
        **LINE,
        "data": {"_target_": "weighed.points", "ignored": 3},
        "loss": {
            "_target_": ENTROPY,
            "weight": {"_target_": "weighed.numbers", "values": [1.0, 5.0, 0.2, 3.0]},
            "label_smoothing": 0.1,
        },
    },
    "shares without labels": {
        **LINE,
        "data": {"_target_": "weighed.points", "ignored": 6},
        "loss": {"_target_": ENTROPY, "ignore_index": weighed.IGNORED},
    },
    "boxes": LINE | {"data": {"_target_": "weighed.boxes"}, "task": {"_target_": "weighed.Detection"}},
    "terms of a mean": LINE | {"data": {"_target_": "weighed.points"}, "task": {"_target_": "weighed.Splitting"}},
    "a temperature that is learned": {
        **LINE,
        "data": {"_target_": "weighed.points"},
        "loss": {"_target_": "weighed.Scaled"},
    },
    "centres that are learned": LINE | {"data": {"_target_": "weighed.boxes"}, "task": {"_target_": "weighed.Centres"}},
    "a tagger of one's own": TAGGER | {"task": {"_target_": "weighed.Tagging"}},
}
EQUAL_AT_THE_START = {
    "model": {"_target_": "weighed.small_tagger"},
    "data": {"_target_": "weighed.padded_later"},
    "task": {"_target_": "weighed.Untold"},
}
REFUSED_WORKERS = 2
WORKERS: dict[str, dict[int, tuple[int, ...]]] = {
    "single": {1: (1, 2, 4)},
    "dp": {1: (2,)},
    "ddp": {1: (2,), 2: (1, 4), 3: (4,)},
    "fsdp": {1: (2,), 2: (1, 4), 3: (4,)},
}
"""Numbers of micro-batches by strategy and number of workers; three have uneven shares, and in the end nothing."""


class Reached(NamedTuple):
    """What came of a training."""

    losses: list[float]
    validation: float
    weights: dict[str, Tensor]
    learned: dict[str, Tensor]
    """By the loss or task."""
    logs: dict[str, list[float]]
    """By name: of each step, and of the validation set."""


def _trial(case: str, strategy: str, workers: int, accumulation: int) -> Trial:
    experiment = Experiment.model_validate(
        {
            "name": "weighed",
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            "train": {
                "epochs": EPOCHS,
                "global_batch_size": BATCH,
                "gradient_accumulation": accumulation,
                "precision": "fp64",
                "clip_grad_norm": 0.5,
                "on_nonfinite": "skip",
            },
            **(CASES[case] if case else EQUAL_AT_THE_START),
        }
    )
    return Training(
        name=case or "refused", experiment=experiment, strategy=strategy, launcher="inprocess", workers=workers,
        devices_per_worker=0, device="cpu", cpus_per_worker=1, allowed=(*BUILT_IN, "weighed"),
    )  # fmt: skip


def _train(rank: Rank, strategies: list[str], folder: Path) -> None:
    """All cases on one rank; processes are started once for all of them."""
    if rank.world_size == REFUSED_WORKERS:
        for strategy in strategies:  # the check of a loss sees all ranks' gradients of sharded weights
            with pytest.raises(ExperimentError, match=r"task: is not the mean .*whose gradients differ by"):
                build(_trial("", strategy, rank.world_size, 1), rank=rank)
    for strategy in strategies:
        for case in CASES:
            for accumulation in WORKERS[strategy][rank.world_size]:
                reached = _trained(_trial(case, strategy, rank.world_size, accumulation), rank)
                if rank.is_first:
                    torch.save(tuple(reached), folder / f"{strategy}, {case}, {accumulation}.pt")


def _trained(trial: Trial, rank: Rank) -> Reached:
    context = build(trial, rank=rank)
    losses = []
    for epoch in range(context.epochs):
        stream = context.batches.training(epoch)
        for step in range(context.order.steps_per_epoch):
            result = train_step(context, stream, step=epoch * context.order.steps_per_epoch + step)
            assert result.has_updated
            losses.append(result.loss.reshape(-1).double())
    sums = torch.stack(losses)
    if rank.world_size > 1:
        dist.all_reduce(sums)
    total, *logs = sums.T
    validation = evaluate(context)
    own = {
        name: [*values.tolist(), validation[f"validation/{name}"]]
        for name, values in zip(context.seen.log_names or (), logs, strict=True)
    }
    weights = {name: value.clone() for name, value in full_state_dict(context).items()}
    return Reached(total.tolist(), validation["validation/loss"], weights, _learned(context), own)


def _learned(context: TrainContext) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in held_by(context.task).named_parameters()}


@cache
def by_hand(case: str) -> Reached:
    """Plain torch: the whole global batch at once."""
    trial = _trial(case, "single", 1, 1)
    torch.manual_seed(mix(trial.experiment.seed, "model"))
    context = build(trial, rank=Rank())  # for its order and its parts alone
    model, loss = context.model, getattr(context.task, "loss", None)
    parameters = [*model.parameters(), *(one for one in held_by(context.task).parameters() if one.requires_grad)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    def of(batch: Any, logs: dict[str, list[float]]) -> Tensor:
        inputs, targets = (one.double() if one.is_floating_point() else one for one in batch)
        if loss is not None:
            return loss(model(inputs), targets)
        if trial.experiment.task is not None and not isinstance(context.task, LanguageModel):
            output = context.task(model, (inputs, targets))
            for name, value in output.logs.items():
                logs.setdefault(name, []).append(float(value.detach().nan_to_num()))
            return output.loss
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    train, validation = components.build(trial.experiment.data, key="data", allowed=trial.allowed)
    losses: list[float] = []
    logs: dict[str, list[float]] = {}
    for epoch in range(EPOCHS):
        for step in range(context.order.steps_per_epoch):
            value = of(train[context.order.global_batch(epoch, step)], logs)
            optimizer.zero_grad()
            if value.isfinite():  # else there is nothing in the batch
                value.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
            else:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            losses.append(float(value.detach().nan_to_num()))
    with torch.no_grad():
        whole = float(of(validation[:], logs))
    return Reached(
        losses,
        whole,
        {name: value.clone() for name, value in model.state_dict().items()},
        _learned(context),
        logs,
    )


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str, int], Reached]:
    """What each strategy reaches."""

    @cache
    def folder(workers: int) -> Path:
        folder = tmp_path_factory.mktemp(f"weights-{workers}")
        on_ranks(_train, [name for name, sizes in WORKERS.items() if workers in sizes], folder,
                 folder=folder, world_size=workers)  # fmt: skip
        return folder

    def load(strategy: str, workers: int, case: str, accumulation: int) -> Reached:
        return Reached(*torch.load(folder(workers) / f"{strategy}, {case}, {accumulation}.pt"))

    return load


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("strategy", "workers"), [(name, number) for name, sizes in WORKERS.items() for number in sizes]
)
def test_the_objective_is_that_of_the_whole_batch(
    reached: Callable[[str, int, str, int], Reached], strategy: str, workers: int, case: str
) -> None:
    expected = by_hand(case)
    for accumulation in WORKERS[strategy][workers]:
        own = reached(strategy, workers, case, accumulation)
        assert own.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
        assert own.validation == pytest.approx(expected.validation, rel=TOLERANCE)
        assert own.logs.keys() == expected.logs.keys()
        for name, values in expected.logs.items():
            assert own.logs[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE)
        for got, wanted in ((own.weights, expected.weights), (own.learned, expected.learned)):
            assert got.keys() == wanted.keys()
            assert all(float((got[name] - value).abs().max()) <= TOLERANCE for name, value in wanted.items())
