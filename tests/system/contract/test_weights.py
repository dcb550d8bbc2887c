"""A loss that is divided by something else than samples is the same objective however its batches are dealt.

Held to plain torch on whole global batches, in fp64, for every number of workers and micro-batches and every strategy.
"""

# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: losses weighted by tokens or class weights; other losses are refused

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import toys
import weighed
from ranks import Ranks
from torch import Tensor, nn

from pipeline.experiment import components
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.tasks import LanguageModel
from pipeline.train.build import build
from pipeline.train.evaluate import evaluate, full_state_dict

TOLERANCE = 1e-12
BATCH = 8
TAGGER = {"model": {"_target_": "weighed.tagger"}, "data": {"_target_": "weighed.tokens"}}
LINE = {"model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": weighed.CLASSES}}
POINTS, BOXES = ({**LINE, "data": {"_target_": f"weighed.{name}"}} for name in ("points", "boxes"))


def _weighted(*weights: float, ignored: int = 0, **arguments: Any) -> dict[str, Any]:
    """An experiment with class weights, in which so many of each eight points have no label."""
    weight = {"weight": {"_target_": "weighed.numbers", "values": weights}} if weights else {}
    data = {"_target_": "weighed.points", "ignored": ignored}
    return {**LINE, "data": data, "loss": {"_target_": "torch.nn.CrossEntropyLoss", **weight, **arguments}}


CASES: dict[str, dict[str, Any]] = {
    "padded tokens": TAGGER | {"task": {"_target_": "pipeline.tasks.LanguageModel"}},
    "hardly any tokens": {
        **TAGGER,
        "data": {"_target_": "weighed.tokens", "empty": True},
        "task": {"_target_": "pipeline.tasks.LanguageModel"},
    },
    "class weights": _weighted(1.0, 5.0, 0.2, 20.0),
    "a class that counts nothing": _weighted(1.0, 0.0, 0.2, 0.0),
    "smoothed, with weights": _weighted(1.0, 5.0, 0.2, 3.0, ignored=3, label_smoothing=0.1),
    "shares without labels": _weighted(ignored=6, ignore_index=weighed.IGNORED),
    "boxes": BOXES | {"task": {"_target_": "weighed.Detection"}},
    "terms of a mean": POINTS | {"task": {"_target_": "weighed.Splitting"}},
    "a temperature that is learned": POINTS | {"loss": {"_target_": "weighed.Scaled"}},
    "centres that are learned": BOXES | {"task": {"_target_": "weighed.Centres"}},
    "a tagger of one's own": TAGGER | {"task": {"_target_": "weighed.Tagging"}},
}
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
    """Those of the model, and of the loss or task with "task." before the name."""
    logs: dict[str, list[float]]
    """By name: of each step, and of the validation set."""


def _trial(case: str, strategy: str, workers: int, accumulation: int) -> Trial:
    sections = {
        "loss": None,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        "train": {
            "epochs": 1, "global_batch_size": BATCH, "gradient_accumulation": accumulation, "clip_grad_norm": 0.5,
            "on_nonfinite": "skip",
        },
    }  # fmt: skip
    options = {"find_unused_parameters": True} if strategy == "ddp" else {}  # as the temperature's loss has one
    return toys.trial(strategy=strategy, workers=workers, options=options, **sections | CASES[case])


def _train(rank: Rank, strategies: list[str]) -> dict[tuple[str, str, int], Reached]:
    """All cases on one rank; processes are started once for all of them."""
    return {
        (strategy, case, accumulation): _trained(_trial(case, strategy, rank.world_size, accumulation), rank)
        for strategy in strategies
        for case in CASES
        for accumulation in WORKERS[strategy][rank.world_size]
    }


def _trained(trial: Trial, rank: Rank) -> Reached:
    s = build(trial, rank=rank)
    s.wrapped.train()
    steps: list[list[float]] = []
    names: tuple[str, ...] = ()
    stream = s.batches.stream(0, last_step=s.steps)
    for step in range(s.steps):
        stepped = s.train_step(s, stream, step=step)
        assert not stepped.skipped
        assert s.facts is not None
        names = ("loss", *s.facts.log_names)
        sums = torch.stack([stepped.sums[name].double() for name in names])
        if rank.world_size > 1:
            dist.all_reduce(sums)
        count = s.order.batch_size(step) if stepped.count is None else float(stepped.count)
        steps.append([value / count if count else 0.0 for value in sums.tolist()])
    values = evaluate(s)
    columns = {name: list(each) for name, each in zip(names, zip(*steps, strict=True), strict=True)}
    weights = {name: value.clone() for name, value in full_state_dict(s).items()}
    logs = {name: [*columns[name], values[f"validation/{name}"]] for name in names[1:]}
    return Reached(columns["loss"], values["validation/loss"], weights, logs)


@cache
def by_hand(case: str) -> Reached:
    """Plain torch: the whole global batch at once."""
    trial = _trial(case, "single", 1, 1)
    s = build(trial, rank=Rank())  # for its order and its parts alone
    model, task, loss = s.model, s.task, getattr(s.task, "loss", None)
    if isinstance(loss, nn.CrossEntropyLoss):
        loss.reduction = "mean"  # the task's is a sum
    parameters = [one for one in s.trainee.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    logs: dict[str, list[float]] = {}

    def of(batch: Any) -> Tensor:
        inputs, targets = (one.double() if one.is_floating_point() else one for one in batch)
        if loss is not None:
            return loss(model(inputs), targets)
        if isinstance(task, LanguageModel):
            return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        found = task(model, (inputs, targets))
        for name, value in found.logs.items():
            logs.setdefault(name, []).append(float(value.detach().nan_to_num()))
        return found.sum / (len(inputs) if found.count is None else found.count)

    train, validation = components.build(trial.experiment.data, key="data", allowed=trial.allowed)
    losses: list[float] = []
    for step in range(s.order.steps_per_epoch):
        value = of(train[s.order.global_batch(step)])
        optimizer.zero_grad()
        if value.isfinite():  # else there is nothing in the batch
            value.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
        else:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        losses.append(float(value.detach().nan_to_num()))
    with torch.no_grad():
        whole = float(of(validation[:]))
    weights = {f"task.{name}": one.detach().clone() for name, one in s.trainee.task.named_parameters()}
    trained = {f"task.{name}" for name, one in s.trainee.task.named_parameters() if one.requires_grad}
    weights = {name: one for name, one in weights.items() if name in trained}
    return Reached(losses, whole, {**{name: one.clone() for name, one in model.state_dict().items()}, **weights}, logs)


@pytest.fixture(scope="module")
def reached() -> Callable[[int], dict[tuple[str, str, int], Reached]]:
    """What so many workers reach, by strategy, case and micro-batches."""

    @cache
    def train(workers: int) -> dict[tuple[str, str, int], Reached]:
        with Ranks(workers, timeout_s=300) as ranks:
            found: list[Any] = ranks.call(_train, [name for name, sizes in WORKERS.items() if workers in sizes])
        return dict(found[0])

    return train


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("strategy", "workers"), [(name, number) for name, sizes in WORKERS.items() for number in sizes]
)
def test_the_objective_is_that_of_the_whole_batch(
    reached: Callable[[int], dict[tuple[str, str, int], Reached]], strategy: str, workers: int, case: str
) -> None:
    expected = by_hand(case)
    for accumulation in WORKERS[strategy][workers]:
        own = reached(workers)[strategy, case, accumulation]
        assert own.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
        assert own.validation == pytest.approx(expected.validation, rel=TOLERANCE)
        assert own.logs.keys() == expected.logs.keys()
        for name, values in expected.logs.items():
            assert own.logs[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE)
        assert own.weights.keys() == expected.weights.keys()
        assert all(float((own.weights[name] - one).abs().max()) <= TOLERANCE for name, one in expected.weights.items())
