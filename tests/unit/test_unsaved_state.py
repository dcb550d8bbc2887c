"""State outside of checkpoints: named once where training changes it, saved where the user's object offers it."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning

import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import EVALUATION, Evaluation, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.tasks import StepOutput
from pipeline.training.loop import train
from pipeline.training.result.restored import evaluate_checkpoint

HERE = "test_unsaved_state"
EVERY = {"every_steps": 1, "keep": 100}


class Helper:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def counter() -> Callable[[], int]:
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        return calls

    return call


def teacher() -> list[nn.Module]:
    """In a list, so that torch doesn't find its parameters."""
    return [nn.Linear(3, 1).double().requires_grad_(False)]


MADE: dict[str, Callable[[], Any]] = {
    "number": lambda: 0,
    "tensor": lambda: torch.zeros(3),
    "large": lambda: torch.zeros(2**19, dtype=torch.float64),
    "list": list,
    "table": lambda: {"steps": 0},
    "array": lambda: np.zeros(3),
    "latest": lambda: deque(maxlen=2),
    "ids": set,
    "helper": Helper,
    "teacher": teacher,
    "generator": lambda: np.random.default_rng(0),
    "numbers": itertools.count,
    "counter": counter,
    "steps": lambda: (number for number in range(100)),
    "late": lambda: 0,
    "missing": lambda: None,
    "drop": lambda: nn.Dropout(0.5),
}
CHANGED: dict[str, Callable[[Any, int], Any]] = {
    "tensor": lambda value, _: value.add_(1),
    "large": lambda value, step: value[step : step + 1].add_(1),
    "list": lambda value, step: value.append(step),
    "table": lambda value, step: value.update(steps=step),
    "array": lambda value, _: value.__iadd__(1),
    "latest": lambda value, step: value.append(step),
    "ids": lambda value, step: value.add(step),
    "helper": lambda value, step: setattr(value, "calls", step),
    "teacher": lambda value, _: value[0].weight.data.mul_(0.9),
    "generator": lambda value, _: value.normal(),
    "numbers": lambda value, _: next(value),
    "counter": lambda value, _: value(),
    "steps": lambda value, _: next(value),
    "drop": lambda value, _: setattr(value, "p", 0.9 * value.p),
}
NAMED = {
    "helper": "model.helper.calls (int)",
    "teacher": "model.teacher[0].weight (Parameter)",
    "counter": "model.counter.calls (int)",
    "steps": "model.steps.number (int)",
    "latest": "model.latest (deque)",
    "drop": "model.drop.p (float)",
}


class Keeping(nn.Linear):
    """Changes an attribute in each training step; "late" and "missing" in the third one."""

    passes: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__(3, 1)
        self.kind = kind
        setattr(self, kind, MADE[kind]())
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        self.passes += self.training
        if self.training and self.kind in CHANGED:
            CHANGED[self.kind](getattr(self, self.kind), int(self.passes))
        elif self.training and (self.kind == "number" or self.passes == 3):
            setattr(self, self.kind, float(self.passes))
        return super().forward(input)


def given(folder: Path, **sections: Any) -> Trial:
    trial = toys.trial(**{"checkpoint": EVERY, **sections})
    return trial.model_copy(update={"checkpoints": str(folder), "allowed": (*trial.allowed, HERE)})


def run(folder: Path, *, resume: bool = False, **sections: Any) -> tuple[TrialResult, toys.Kept, list[str]]:
    outbox, trial = toys.Kept(), given(folder, **sections)
    result = train(trial.model_copy(update={"resume": resume}), rank=Rank(), outbox=outbox)
    return result, outbox, warned(outbox)


def warned(outbox: toys.Kept) -> list[str]:
    return [event.message for event in outbox.events if isinstance(event, Warned)]


def keeping(kind: str) -> dict[str, Any]:
    return {"_target_": f"{HERE}.Keeping", "kind": kind}


@pytest.mark.parametrize("kind", MADE)
def test_what_the_model_changes_is_named_once(kind: str, tmp_path: Path) -> None:
    *_, messages = run(tmp_path, model=keeping(kind))
    (message,) = messages
    value = "float" if kind in ("number", "late", "missing") else type(MADE[kind]()).__name__
    name = NAMED.get(kind, f"model.{kind} ({value})")
    assert message.startswith(f"{name} changed in training, and checkpoints do not contain the change.")


# Other objects of the experiment


class Annealed:
    """A task with a weight that grows; without ``saves``, its count is lost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        self.calls += model.training
        outputs = model(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1]) + min(1, self.calls / 20) * outputs.square().mean()
        return StepOutput(loss, outputs, batch[1])


class SavedTask(Annealed):
    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Annealing(nn.Module):
    """The same as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return nn.functional.mse_loss(outputs, targets) + min(1, self.calls / 20) * outputs.square().mean()


class Following(Annealed):
    """Its loss grows with the step, which it gets."""

    place = 0

    def begin_step(self, step: int, *, epoch: int, batch: int) -> None:
        self.place = step

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        output = super().__call__(model, batch)
        self.calls = 0
        return output._replace(loss=output.loss * (1 + self.place))


class SavedLoss(Annealing):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Distilling(nn.Module):
    """A loss whose frozen teacher follows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(1, 1, bias=False).requires_grad_(False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.teacher.weight.data.mul_(0.9)
        return nn.functional.mse_loss(outputs, self.teacher(targets))


class Warming(torch.optim.SGD):
    calls: ClassVar[int] = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        type(self).calls += 1
        return super().step(closure)


class Noisy(toys.Plain):
    """With a generator of its own, and a cache of what was read."""

    def __init__(self, samples: Any, *, scale: float) -> None:
        super().__init__(samples)
        self.generator, self.scale = np.random.default_rng(0), scale
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.cache.setdefault(index, super().__getitem__(index))
        return inputs + self.scale * float(self.generator.normal()), targets


def noisy(scale: float) -> tuple[Dataset[Any], Dataset[Any]]:
    train, validation = toys.regression()
    return Noisy(train, scale=scale), validation  # type: ignore[return-value]


OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "task": ({"task": {"_target_": f"{HERE}.Annealed"}, "loss": None}, ["task.calls (int) changed"]),
    "loss": ({"loss": {"_target_": f"{HERE}.Annealing"}}, ["loss.calls (int) changed"]),
    "teacher": ({"loss": {"_target_": f"{HERE}.Distilling"}}, ["loss.teacher.weight (Parameter) changed"]),
    "optimizer": (
        {"optimizer": {"_target_": f"{HERE}.Warming", "lr": 0.05}},
        ["optimizer.count (int), optimizer.Warming.calls (int) changed"],
    ),
    "generator": (
        {"data": {"_target_": f"{HERE}.noisy", "scale": 0.1}},
        ["training set.generator (Generator) changes: its first sample differs"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_other_objects_change_is_named(case: str, tmp_path: Path) -> None:
    sections, expected = OTHERS[case]
    *_, messages = run(tmp_path, **sections)
    assert len(messages) == len(expected), messages
    assert all(message.startswith(text) for message, text in zip(messages, expected, strict=True)), messages


class Uncounted(list[int]):
    def __len__(self) -> int:
        raise OSError("no connection")


class Connected(nn.Linear):
    """Has an attribute that cannot be read."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.rows = Uncounted()


def test_attributes_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    *_, messages = run(tmp_path, model={"_target_": f"{HERE}.Connected"})
    (message,) = messages
    assert message.startswith("could not check for state outside of checkpoints. Reading the attributes")
    assert "OSError: no connection" in message


class Caching(nn.Linear):
    """Keeps what it computes anew, or once and for all; its count is extra state."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.width, self.is_ready, self.positions, self.outputs = 0, False, None, None
        self.calls, self.seen = 0, [0.0]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        if self.positions is None:
            self.width, self.is_ready, self.positions = input.shape[1], True, torch.arange(3)
        self.calls += self.training
        self.seen.append(1.0)
        self.outputs = super().forward(input) * (1 + self.calls / 100)
        return self.outputs

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Looking(Caching):
    """Without extra state, and nothing to save."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        outputs = super().forward(input)
        self.calls, self.seen = 0, [0.0]
        return outputs

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


SAVED: dict[str, dict[str, Any]] = {
    "extra state": {"model": {"_target_": f"{HERE}.Caching"}},
    "caches": {"model": {"_target_": f"{HERE}.Looking"}},
    "task": {"task": {"_target_": f"{HERE}.SavedTask"}, "loss": None},
    "task in steps": {"task": {"_target_": f"{HERE}.Following"}, "loss": None},
    "loss": {"loss": {"_target_": f"{HERE}.SavedLoss"}},
    "cache of samples": {"data": {"_target_": f"{HERE}.noisy", "scale": 0.0}},
    "metric": {"metrics": {"count": {"_target_": "toy_metrics.Count"}}},
}


@pytest.mark.parametrize("case", SAVED)
def test_what_is_saved_or_computed_again_is_exact_and_not_named(case: str, tmp_path: Path) -> None:
    _, whole, messages = run(tmp_path / "whole", **SAVED[case])
    run(tmp_path / "half", train={"epochs": 1}, **SAVED[case])
    result, resumed, more = run(tmp_path / "half", resume=True, **SAVED[case])

    assert (messages, more) == ([], [])
    assert whole.series("train/loss")[-3:] == resumed.series("train/loss")[-3:]
    assert evaluated(tmp_path / "half", step=6, **SAVED[case]) == (result.metrics["validation/loss"], [])


def evaluated(folder: Path, *, step: int, **sections: Any) -> tuple[float, list[str]]:
    trial, outbox = given(folder, **sections), toys.Kept()
    shared = {name: getattr(trial, name) for name in Trial.model_fields if name != "role"}
    shared |= {"name": EVALUATION, "checkpoints": str(folder), "step": step, "split": "validation"}
    found = evaluate_checkpoint(Evaluation(**shared), rank=Rank(), outbox=outbox)
    return found.values["validation/loss"], warned(outbox)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_metric_over_all_evaluations_is_resumed_or_named(persistent: bool, tmp_path: Path) -> None:
    metrics = {"ever": {"_target_": "toy_metrics.Ever", "persistent": persistent}}
    _, _, first = run(tmp_path, train={"epochs": 1}, metrics=metrics)
    result, _, again = run(tmp_path, resume=True, metrics=metrics)
    assert result.metrics["validation/ever"] == (20.0 if persistent else 10.0)
    named = [message.partition(",")[0] for message in (*first, *again)]
    before = "metrics.ever.seen changed before the checkpoint"
    assert named == ([] if persistent else ["metrics.ever.seen (Tensor) changed in training", before])


# Where it is read


def test_a_resumed_training_and_an_evaluation_name_what_they_lack(tmp_path: Path) -> None:
    run(tmp_path, train={"epochs": 1}, model=keeping("list"))
    *_, again = run(tmp_path, resume=True, model=keeping("list"))
    _, told = evaluated(tmp_path, step=6, model=keeping("list"))

    assert [message.partition(".")[2].partition(",")[0] for message in (*again, *told)] == [
        "list changed before the checkpoint"
    ] * 2


def test_a_result_of_the_best_step_says_what_is_of_the_last(tmp_path: Path) -> None:
    best = {"best": "validation/loss", "mode": "max", "keep": 1}
    result, *_ = run(tmp_path, model=keeping("list"), data={"_target_": "toys.with_test"}, checkpoint=best)
    (note,) = result.data_notes
    assert note.startswith("the result has the weights of step 3, but model.list of step 6. Checkpoints do not")
