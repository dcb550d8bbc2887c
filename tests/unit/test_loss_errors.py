"""torch's errors about losses, with the shapes, types and values that torch doesn't name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import ExperimentError
from pipeline.training.step.explained_errors import hint
from pipeline.training.step.explained_errors.losses import explain

ENTROPY = {"data": {"_target_": "toys.classification"}, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
BILINEAR = {"_target_": "torch.nn.Bilinear", "in1_features": 3, "in2_features": 3, "out_features": 1}
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}
CLASSES = torch.randn(4, 3)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT011 (any)
        call()
    return info.value


@pytest.mark.parametrize(
    ("outputs", "targets", "said"),
    [
        (CLASSES, torch.tensor([0, 1, 2, 3]), "Targets are from 0 to 3, but 3 classes are numbered 0 to 2; give the "
         "model 4 outputs, or number the classes from 0"),
        (CLASSES, torch.tensor([1, 2, 3, 1]), "Targets are from 1 to 3, but 3 classes are numbered 0 to 2; number the "
         "classes from 0, e.g. targets - 1"),
        (CLASSES, torch.tensor([-1, 2, -100, 1]), "Targets are from -1 to 2, but 3 classes are numbered 0 to 2; number "
         "the classes from 0, or set ignore_index: -1 to ignore these targets"),
        (CLASSES, torch.zeros(4), "targets of shape (4,) (float32), but class numbers must be int64; return "
         "targets.long() from the dataset"),
        (CLASSES, torch.zeros(4, dtype=torch.int32), "(int32), but class numbers must be int64"),
        (CLASSES, torch.zeros(4, 1, dtype=torch.int64), "for 3 classes, targets must have the shape (4,)"),
        (CLASSES, torch.zeros(4, 3, dtype=torch.int64), "use class numbers, targets.argmax(1), or probabilities"),
        ((CLASSES, None), torch.zeros(4), "the model returned a tuple of 2: Tensor (4, 3), NoneType; set `task:`"),
        ({"out": CLASSES}, torch.zeros(4), "the model returned a mapping with the keys out; set `task:`"),
        (CLASSES, [0, 1, 2, 0], "needs a tensor of targets, but got a list of 4: int, int, int, int"),
    ],
)  # fmt: skip
def test_cross_entropy_tells_what_it_got(outputs: Any, targets: Any, said: str) -> None:
    error = raised(lambda: nn.CrossEntropyLoss()(outputs, targets))
    assert said in explain(error)


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy]
)
def test_shapes_that_don_t_fit_are_told(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with warnings.catch_warnings(action="ignore"):
        error = raised(lambda: loss(torch.ones(4, 3), torch.ones(4, 2)))
    said = "gets outputs of shape (4, 3) (float32) and targets of shape (4, 2) (float32); give both the same shape"
    assert explain(error) == said


@pytest.mark.parametrize("loss", [functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy])
def test_types_that_don_t_fit_are_told(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    error = raised(lambda: loss(torch.ones(4), torch.ones(4, dtype=torch.int64)))
    assert explain(error).endswith("(int64), but needs the same type for both; return targets.float() from the dataset")


def test_other_errors_keep_torch_s_words() -> None:
    assert explain(raised(lambda: CLASSES @ CLASSES)) == ""


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("weight", lambda weight: functional.cross_entropy(CLASSES, torch.tensor([0, 1, 2, 0]), weight)),
        ("pos_weight", lambda weight: functional.binary_cross_entropy_with_logits(CLASSES, CLASSES, pos_weight=weight)),
    ],
)
def test_weights_of_another_number_of_classes(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    assert explain(raised(lambda: loss(torch.ones(2)))) == (
        f"gets {name} of shape (2,) (float32) for outputs of shape (4, 3) (float32); "
        f"set {name} to a list with one number for each class"
    )


def refused(**sections: Any) -> str:
    with pytest.raises(ExperimentError) as info:
        toys.trained(**sections)
    (problem,) = info.value.problems
    return f"{problem.key}: {problem.message}"


def test_a_target_that_is_no_class_is_a_mistake_in_the_experiment() -> None:
    assert refused(**ENTROPY, model=LINEAR) == (
        "loss: gets outputs of shape (8, 2) (float64) and targets of shape (8,) (int64). Targets are from 0 to 2, but "
        "2 classes are numbered 0 to 1; give the model 3 outputs, or number the classes from 0"
    )


def test_a_model_that_returns_a_tuple_needs_a_task() -> None:
    said = refused(**ENTROPY, model={"_target_": "torch.nn.LSTM", "input_size": 3, "hidden_size": 3})
    assert said.startswith("loss: needs a tensor, but the model returned a tuple of 2: Tensor (8, 3), tuple; set `")


FLAT = {"model": {"_target_": "toys.flat_net"}}
SPREAD = "targets of shape (8, 1){}, which torch broadcasts to (8, 8); return targets.squeeze(-1) from the dataset, or"


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss", "SoftMarginLoss"])
def test_a_loss_that_broadcasts_is_refused(name: str) -> None:
    """Most of torch's losses do so in silence, others with a warning that only the rank's log has."""
    said = refused(**FLAT, loss={"_target_": f"torch.nn.{name}"})
    assert said.startswith("loss: gets outputs of shape (8,) (float64) and " + SPREAD.format(" (float64)"))


def test_a_loss_within_a_task_that_broadcasts_is_refused() -> None:
    said = refused(**FLAT, loss=None, task={"_target_": "toys.SquaredTask"})  # found on a few samples
    assert said.startswith("task: gets outputs of shape (5,) and " + SPREAD.format("").replace("8", "5"))


def test_what_broadcasts_to_no_more_elements_is_trained() -> None:
    """A sample alone: outputs of shape (1,) and targets of (1, 1) are one pair."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        result, _ = toys.trained(**FLAT, train={"global_batch_size": 1, "epochs": 1})
    assert result.losses


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: nn.Embedding(4, 2)(torch.tensor([4])), "; an embedding got an index out of range"),
        (lambda: _double_targets().backward(), "; the targets and the model's outputs have different types"),
        (lambda: nn.Linear(2, 1)(torch.ones(3, 2, dtype=torch.float64)), "; the inputs and weights of a layer have"),
        (lambda: nn.Conv1d(2, 1, 1)(torch.ones(3, 2, 4).byte()), "; the inputs and weights of a layer have"),
        (lambda: nn.LayerNorm(2)(torch.ones(3, 2, dtype=torch.float64)), "; the inputs and weights of a layer have"),
        (lambda: CLASSES @ CLASSES, ""),
        (lambda: _raise(RuntimeError("index out of range in self")), ""),
    ],
)
def test_usual_errors_of_torch_have_a_hint(fails: Callable[[], object], said: str) -> None:
    found = hint(raised(fails))
    assert said in found
    assert bool(found) == bool(said)


def test_the_layer_of_an_error_has_its_name_in_the_model() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 1))
    assert hint(raised(lambda: model(torch.ones(2, 3)))).startswith("; in layer 1: Linear(in_features=7, out_feat")


@pytest.mark.parametrize(
    ("data", "inputs"),
    [("toys.paired", "a list of 2: Tensor (8, 3), Tensor (8, 3)"), ("toys.regression", "a tensor of shape (8, 3)")],
)
def test_a_model_with_other_arguments_is_told_how_it_is_called(data: str, inputs: str) -> None:
    said = refused(model=BILINEAR, data={"_target_": data})
    assert said.startswith(f"model: is called with one argument, the batch's inputs ({inputs}), but ")
    assert "forward() missing 1 required positional argument: 'input2'. Set `task:` to a class" in said


def _double_targets() -> Any:
    return functional.huber_loss(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64))


def _raise(error: Exception) -> None:
    raise error
