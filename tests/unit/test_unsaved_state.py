"""State outside of checkpoints: named once where the first step changes it, saved where the user's object offers it."""

# promise: state outside of checkpoints is saved or named; parameters that start or stop learning

from pathlib import Path
from typing import Any

import checkpointed
import numpy as np
import pytest
import torch
import toy_metrics
import toys
from checkpointed import assert_same, resumed
from torch import Tensor, nn

from pipeline.protocol.trial import EVALUATION, Evaluation, Rank, Trial
from pipeline.tasks import Loss
from pipeline.train.restored import evaluate_checkpoint


class Ever(toy_metrics.Count):
    """How many samples it has seen in all evaluations; ``persistent`` saves it."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.persistent(persistent)

    def reset(self) -> None:
        self._computed = None


HERE = "test_unsaved_state"


class Keeping(nn.Linear):
    """Changes an attribute in each training pass."""

    def __init__(self, kind: str) -> None:
        super().__init__(3, 1)
        self.number, self.tensor, self.array, self.table = 0, torch.zeros(3), np.zeros(3), {"steps": [0, 0.0]}
        self.kind = kind

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        if self.training:
            value = getattr(self, self.kind)
            if self.kind == "table":
                value["steps"][1] += 1.0
            else:
                setattr(self, self.kind, value + 1)
        return super().forward(input)


class Annealed:
    """A task with a weight that grows with its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += model.training
        outputs = model(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1]) + min(1, self.calls / 20) * outputs.square().mean()
        return Loss(loss * len(outputs), None, outputs, batch[1])


class Following(Annealed):
    """Its loss grows with the step, which it gets."""

    place = 0

    def begin_step(self, step: int, *, epoch: int, batch: int) -> None:
        self.place = step

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        found = super().__call__(model, batch)
        self.calls = 0
        return found._replace(sum=found.sum * (1 + self.place))


class Annealing(nn.Module):
    """The same as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.training
        return nn.functional.mse_loss(outputs, targets) + min(1, self.calls / 20) * outputs.square().mean()


class Counting(nn.Linear):
    """A model whose count is extra state."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        self.calls += self.training
        return super().forward(input) * (1 + self.calls / 100)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def own(section: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {section: {"_target_": f"{HERE}.{name}", **arguments}, **({"loss": None} if section == "task" else {})}


UNSAVED: dict[str, dict[str, Any]] = {
    **{f"model.{kind}": own("model", "Keeping", kind=kind) for kind in ("number", "tensor", "array")},
    "model.table['steps'][1]": own("model", "Keeping", kind="table"),
    "task.calls": own("task", "Annealed"),
    "task.loss.calls": own("loss", "Annealing"),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_the_first_step_changes_is_named_once(name: str, tmp_path: Path) -> None:
    (warning,) = checkpointed.run(tmp_path, **UNSAVED[name]).warnings
    assert warning.startswith(f"{name} changed in training, and checkpoints do not contain the change.")


@pytest.mark.parametrize("sections", [own("model", "Counting"), own("task", "Following")], ids=["extra state", "steps"])
def test_what_is_saved_or_computed_again_is_exact_and_not_named(sections: dict[str, Any], tmp_path: Path) -> None:
    again, whole = resumed(tmp_path, after=2, **sections)
    assert whole.warnings == again.warnings == []
    assert_same(again, whole, after=2)

    folder, outbox = tmp_path / "after 2", toys.Kept()
    trial = toys.trial(checkpoints=str(folder), **sections)
    shared = {name: getattr(trial, name) for name in Trial.model_fields if name != "role"}
    shared |= {"name": EVALUATION, "checkpoints": str(folder), "step": 6, "split": "validation"}
    found = evaluate_checkpoint(Evaluation(**shared), rank=Rank(), outbox=outbox)
    assert found.values["validation/loss"] == whole.result.metrics["validation/loss"]
    assert outbox.warnings == []


@pytest.mark.parametrize(("persistent", "expected"), [(True, 20.0), (False, 10.0)])
def test_a_metric_over_all_evaluations_is_resumed_if_its_states_are(
    persistent: bool, expected: float, tmp_path: Path
) -> None:
    metrics = {"ever": {"_target_": "test_unsaved_state.Ever", "persistent": persistent}}
    checkpointed.run(tmp_path, train={"epochs": 1}, metrics=metrics)
    again = checkpointed.run(tmp_path, train={"epochs": 2}, metrics=metrics, resume=True)
    assert again.result.metrics["validation/ever"] == expected


class Renaming(nn.Linear):
    """Its state has other names than its parameters."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight")


def test_a_state_with_other_names_is_told_at_the_first_checkpoint(tmp_path: Path) -> None:
    (warning,) = checkpointed.run(tmp_path, **own("model", "Renaming", in_features=3, out_features=1)).warnings
    assert warning.startswith("state_dict() of the model has other names than its parameters and buffers: kernel")
