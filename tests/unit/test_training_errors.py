"""Trainings that can't be: each is refused in one process by the key, what is wrong, and what to do."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest
import torch
import toy_contrastive
import toy_gans
import toy_metrics
import toys
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.consistency import contradictions
from pipeline.tasks import Loss
from pipeline.train import Hook, State

HERE = "test_training_errors"


class Refusing(toy_metrics.Count):
    """Takes no batch."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        raise ValueError("no such\ntargets")


def wrong_transform(name: str) -> Any:
    """A transform that is wrong in one way."""

    def fail(inputs: Tensor, targets: Tensor) -> None:
        raise ValueError("no such\nmix")

    return {
        "number": 3,
        "fails": fail,
        "one": lambda inputs, _: inputs,
        "arrays": lambda inputs, targets: (inputs.numpy(), targets),
        "shorter": lambda inputs, targets: (inputs[1:], targets[1:]),
    }[name]


class Returning(Hook):
    """A hook of which one method returns what an argument says."""

    def __init__(self, *, method: str, value: Any = None) -> None:
        self.method, self.value = method, value

    def report(self, s: State) -> Mapping[str, float]:
        return cast(Mapping[str, float], self.value) if self.method == "report" else {}

    def after_evaluation(self, s: State, values: Mapping[str, float]) -> Mapping[str, float]:
        return cast(Mapping[str, float], self.value) if self.method == "after_evaluation" else {}


def no_hook() -> int:
    return 3


class Halving(Hook):
    """Half of the samples of each batch."""

    def transform(self, batch: Any) -> Any:
        return tuple(one[: len(one) // 2] for one in batch)


class WithCount(torch.nn.Module):
    """A squared error with a count of its own."""

    def __init__(self, *, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss((model(batch[0]) - batch[1]).square().sum(), torch.tensor(self.count))


class Constant(torch.nn.Module):
    """A loss without a graph."""

    def forward(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(torch.zeros(()), torch.zeros(()))


def empty() -> tuple[Dataset[Any], None]:
    return toys.Plain([]), None


def one_set() -> Dataset[Any]:
    return toys.Plain([1.0])


class PerSample(nn.Module):
    """A loss for each sample instead of their mean."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(2)


class PerSampleTask:
    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch[0])
        return Loss((outputs - batch[1]).pow(2), None, outputs, batch[1])


def accuracy_function() -> Any:
    return lambda outputs, targets: 1.0


class Stretched:
    """Takes anything and is nothing in particular."""

    def __init__(self, *args: Any) -> None:
        pass


def counting_net() -> nn.Module:
    return nn.Sequential(toys.Counting(), nn.Linear(1, 1))


def flat_sgd(parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """Makes one group of all that it is given."""
    return torch.optim.SGD([one for group in parameters for one in group["params"]], lr=lr)


LR = "torch.optim.lr_scheduler."
COSINE = {"_target_": f"{LR}CosineAnnealingLR", "T_max": "${total_steps}"}
PLATEAU = {"_target_": f"{LR}ReduceLROnPlateau", "patience": 0}
ONE_CYCLE = {"_target_": f"{LR}OneCycleLR", "max_lr": 0.1, "total_steps": 5}
BY_EPOCH, ENDLESS = {"scheduler_interval": "epoch"}, {"epochs": None, "steps": 9}
BOTH, COUNT = ["train", "validation"], {"_target_": "toy_metrics.Count"}
CLASSES = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "data": {"_target_": "toys.classification"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
MEAN, HALVED = {"_target_": "toys.Mean"}, {"_target_": "toys.Halved"}
SCALED: dict[str, Any] = {"lr_scaling": {"rule": "linear", "base_batch_size": 2}}
NET: dict[str, Any] = {"model": {"_target_": "toys.NormedNet"}}


def of(section: str, target: str, **arguments: Any) -> dict[str, Any]:
    """Sections with another component."""
    return {section: {"_target_": target, **arguments}, **({"loss": None} if section == "task" else {})}


def metric(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"torchmetrics.classification.{name}", "num_classes": 3, **arguments}


def measured(*, best: str = "", **metrics: Any) -> dict[str, Any]:
    return {**CLASSES, "metrics": metrics, "checkpoint": {"best": f"validation/{best}", "mode": "max"} if best else {}}


def stream(kind: str, **arguments: Any) -> dict[str, Any]:
    return of("data", "toy_streams.stream", kind=kind, **arguments)


def gan(**sections: Any) -> dict[str, Any]:
    return {**toy_gans.SECTIONS, **sections}


def duel(fails: str) -> dict[str, Any]:
    return gan(task={"_target_": "toy_gans.Duel", "fails": fails})


def returning(method: str, value: Any) -> dict[str, Any]:
    return {"hooks": [{"_target_": f"{HERE}.Returning", "method": method, "value": value}]}


def transform(name: str) -> dict[str, Any]:
    return {"train": {"batch_transform": {"_target_": f"{HERE}.wrong_transform", "name": name}}}


EACH = metric("MulticlassF1Score", average="none")
SEVERAL = gan(schedulers={})
REFUSED: list[tuple[dict[str, Any], str]] = [
    # Losses and tasks
    (of("loss", f"{HERE}.PerSample"), "loss: is a tensor of shape (8, 1), not a scalar"),
    (of("task", f"{HERE}.PerSampleTask"), "task: ... tensor of shape (8, 1)"),
    (of("loss", "torch.nn.MSELoss", reduction="sum"), "loss: ... set reduction: mean"),
    (of("task", f"{HERE}.WithCount", count=-3), "task: returned a negative Loss.count"),
    (of("task", f"{HERE}.Constant"), "task: returned a loss that does not depend on any parameter"),
    # The model
    (of("model", "toys.frozen_net"), "model: toys.frozen_net has no trainable parameters"),
    (of("model", "toys.not_a_model"), "model: ... returned a dict; it must return a torch.nn.Module"),
    (of("model", "toys.Switching", learns=[False, True]), "model: body.weight, body.bias require a gradient after ste"),
    ({**of("model", f"{HERE}.counting_net"), "train": {"activation_checkpointing": "0"}},
     "train.activation_checkpointing: ... recomputing Counting would update its buffer calls twice"),
    (of("model", "toys.with_a_part_named_task") | of("loss", "toys.Uncertain"),
     "model: has a part named task (task.weight), ... rename it"),
    # Data
    (of("data", f"{HERE}.one_set"), "data: ... returned a Plain. Return a tuple"),
    (of("data", "toys.singles"), "data: a batch is a tuple of 1: Tensor (8, 3), not (inputs, targets)"),
    (of("data", f"{HERE}.empty"), "data: the training set is empty"),
    (of("data", "toys.unreadable", index=0), "sample 0 of the data can't be read: OSError: no such image"),
    (of("data", "toys.unreadable", index=5), "sample 5 of the data can't be read: OSError: no such image"),
    (stream("Plain"), "train.epochs: is 2, but the training set is iterable and has no length"),
    ({**stream("Sized"), "sampler": {"_target_": "toy_streams.in_order"}}, "sampler: does not apply to an it"),
    ({**stream("Sized"), "loader": {"num_workers": 2}}, "loader.num_workers: is 2, but the training set is iterable"),
    ({**of("data", "toy_streams.with_sized_validation"), "loader": {"num_workers": 2}},
     "loader.num_workers: is 2, but the validation set is iterable"),
    (stream("Sized", samples=0), "data: the training set is empty"),
    ({**stream("Plain", samples=0), "train": ENDLESS}, "the training set has no sample 0, counted from 0"),
    (stream("Failing"), "sample 10 of the training set can't be read: OSError: the connection broke"),
    (stream("Longer", by=1), "the training set returned more samples than its length, 22; correct its __len__"),
    (stream("Longer", by=-1), "the training set has no sample 21, counted from 0, in epoch 1"),
    # Metrics
    ({"metrics": {"a": {"_target_": f"{HERE}.accuracy_function"}}}, "metrics.a: ... a function; use a torchmetrics"),
    ({"metrics": {"picky": {"_target_": f"{HERE}.Refusing", "on": BOTH}}},
     "metrics.picky: on: [train, validation] raised for training batches ValueError: no such targets"),
    (of("task", "toys.Logged") | {"metrics": {"twice": COUNT}},
     "metrics.twice: reports validation/twice, and so does Loss.logs; rename one"),
    (measured(wrong=metric("MulticlassAccuracy", num_classes=2)), "metrics.wrong: MulticlassAccuracy raised "),
    (measured(words={"_target_": "toy_metrics.Texts"}),
     "metrics.words: Texts returned a str. Use a metric that returns a number, a number for each class,"),
    (measured(f=EACH, f_1=metric("MulticlassF1Score")),
     "metrics.f_1: reports validation/f_1, and so does metrics.f; rename one of them"),
    (measured(f=EACH, best="f"),
     "checkpoint.best: validation/f is not reported; metrics.f reports validation/f_0, validation/f_1, "),
    (measured(roc=metric("MulticlassROC"), best="roc"),
     "checkpoint.best: validation/roc is not reported; metrics.roc reports no number"),
    ({"train": {"early_stopping": {"patience": 2}}, "data": {"_target_": "toys.regression", "validation": 0}},
     "train.early_stopping: monitors validation/loss, but there is no"),
    ({**toy_contrastive.CASES["both"], "train": {"evaluation_batch_size": 2}},
     "train.evaluation_batch_size: has no effect: the task compares all"),
    # Optimizers and schedulers
    (of("optimizer", f"{HERE}.Stretched"), "optimizer: ... is a Stretched, not a torch.optim"),
    (of("optimizer", "torch.optim.LBFGS"), "optimizer: the step() of LBFGS needs a closure, which is not supp"),
    ({**NET, **of("optimizer", f"{HERE}.flat_sgd", lr=0.1, groups=[{"match": "head.*", "lr": 0.5}])},
     "optimizer.groups[0].lr: is 0.5, but SGD ignores it"),
    ({**NET, **of("optimizer", "torch.optim.SGD", lr=0.1, groups=[{"match": "head.*", "lr": 0.5}]),
      **of("scheduler", "toys.one_cycle")}, "scheduler: toys.one_cycle uses OneCycleLR, whose rates override"),
    ({**of("scheduler", "toys.one_cycle"), "train": SCALED}, "scheduler: ... whose rates override train.lr_scaling"),
    ({"scheduler": {**COSINE, "T_max": "ten"}}, "scheduler: a step raised TypeError: ... 'str'"),
    ({"scheduler": PLATEAU}, "scheduler: ... set train.scheduler_interval: epoch"),
    ({"scheduler": PLATEAU, "train": BY_EPOCH, "data": {"_target_": "toys.regression", "validation": 0}},
     "scheduler: ... there is no validation set"),
    ({"scheduler": ONE_CYCLE},
     "scheduler: OneCycleLR has total_steps 5, but the training advances it 6 times. Set total_steps to 6 or more."),
    ({"scheduler": COSINE, "train": {"scheduler_metric": "validation/loss"}},
     "train.scheduler_metric: only applies to ReduceLROnPlateau"),
    # Several optimizers
    (duel("name"), "task: called update for optimizer 'other'; use one of critic, generator"),
    (duel("missing"), "task: gave no loss for optimizers.generator; call update for each optimizer, for every batch"),
    (duel("detached"), "task: gave a loss that does not depend on any parameter of optimizers.generator"),
    (duel("independent"), "task: gave a loss that does not depend on any parameter of optimizers.generator"),
    (duel("taken"), "task: logs loss_critic, which is already reported; choose another name"),
    (duel("nothing later"), "task: Loss.logs has nothing in one batch, but score in the first."),
    (duel("list"), "task: called update with a tensor of shape (1,) as the loss; it must be a scalar, the mean over"),
    ({**SEVERAL, "task": {"_target_": "toys.SquaredTask"}, "optimizers": {"one": {**toy_gans.ADAM, "params": "*"}}},
     "task: does not take the arguments of task(model, batch, update): ... Call update(name, loss) for"),
    ({**SEVERAL, "optimizer": toy_gans.ADAM, "optimizers": {}},
     "task: does not take the arguments of task(model, batch): ... 'update'. A third, update, needs several"),
    # Losses over the global batch
    ({**toy_contrastive.case("Similar"), "train": {"gradient_accumulation": 2}},
     "train.gradient_accumulation: is 2, but the task compares all"),
    (toy_contrastive.case("ByView"),
     "task: called pipeline.tasks.gathered with ... shape (16, 4). It needs 8 rows, one for each"),
    *((toy_contrastive.case(name), "task: calls pipeline.tasks.gathered, but not in the first batch of training")
      for name in ("InEvaluation", "Late")),
    # Hooks and transforms
    ({"hooks": [{"_target_": f"{HERE}.Halving"}]}, "hooks: transform() returned 4 of 8 samples"),
    ({"hooks": [{"_target_": f"{HERE}.no_hook"}]}, "hooks[0]: is a int, not a pipeline.train.Hook; derive it from"),
    ({"hooks": [MEAN, HALVED, MEAN]}, "hooks[2]: is a second toys.Mean; list each hook once"),
    (returning("report", [1]), "hooks: ... Returning.report returned list; return numbers by name, or {}"),
    (returning("report", {"loss": 9.0}), "hooks: ... Returning reports loss, which is taken"),
    (returning("after_evaluation", {"x": "high"}),
     "hooks: ... Returning.after_evaluation returned dict; return numbers by name, or {}"),
    (returning("after_evaluation", {"validation/loss": 1.0}),
     "hooks: ... Returning.after_evaluation returned a value of validation/loss, which"),
    (transform("number"), "train.batch_transform: ... returned a int, which can't be called; return "
     "a function of inputs and targets"),
    (transform("fails"), "train.batch_transform: raised ValueError: no such mix"),
    (transform("one"), "train.batch_transform: the returned value is a tensor of shape (8, 3), not (inputs, targets); "
     "return both"),
    (transform("shorter"), "train.batch_transform: transform() returned 7 of 8 samples; return as many samples as it"),
]  # fmt: skip
"""Sections, and what is said: "..." stands for some words."""


@pytest.mark.parametrize(("sections", "said"), REFUSED, ids=[said[:60] for _, said in REFUSED])
def test_it_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises((ExperimentError, TrainingError)) as caught:
        toys.trained(**sections)
    assert re.match(".*".join(map(re.escape, said.split(" ... "))), str(caught.value), re.DOTALL), str(caught.value)


FSDP = {"strategy": "fsdp", "launcher": "torchrun", "workers": 2}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "groups": [{"match": "a", "lr": 0.1}]},
      "scheduler": ONE_CYCLE},
     "optimizer.groups[0].lr: has no effect, because scheduler.max_lr replaces it. Set a list there,"),
    ({"train": {"start_from": {}}}, "train.start_from: has neither run nor file. Set one of them."),
    ({"train": {"start_from": {"run": "a", "file": "b"}}}, "train.start_from: has both run and file"),
    ({"checkpoint": {"best": "validation/loss", "keep": 0}},
     "checkpoint.best: needs a checkpoint, but checkpoint.keep is 0. Set checkpoint.keep: 1."),
    ({"train": {"evaluation_batch_size": 2}, "parallel": {**FSDP, "workers": 3}}, "train.evaluation_batch_size: "),
    ({"metrics": {"count": {**COUNT, "on": ["train"]}}}, "metrics.count.on: "),
    ({"metrics": {"gradient_norm": {**COUNT, "on": BOTH}}}, "metrics.gradient_norm.on: "),
    ({"train": {"memory_format": "channels_last"}, "parallel": FSDP},
     "parallel.strategy: ... train.memory_format: contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "said"), CONTRADICTIONS, ids=[said[:60] for _, said in CONTRADICTIONS])
def test_keys_that_contradict_each_other_are_refused(sections: dict[str, Any], said: str) -> None:
    (problem,) = contradictions(toys.experiment(**sections))
    assert re.match(".*".join(map(re.escape, said.split(" ... "))), str(problem)), str(problem)


def test_a_metric_of_the_validation_set_may_have_the_name_of_a_value_of_training() -> None:
    assert not [*contradictions(toys.experiment(metrics={"gradient_norm": COUNT}))]
