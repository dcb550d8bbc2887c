"""torch's errors about losses, with the shapes, types and values that torch doesn't name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import nn
from torch.nn import functional

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.errors import explain, hint
from pipeline.train.state import State

ENTROPY = {"data": {"_target_": "toys.classification"}, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
BILINEAR = {"_target_": "torch.nn.Bilinear", "in1_features": 3, "in2_features": 3, "out_features": 1}
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}
CLASSES = torch.randn(4, 3)


def raised(call: Callable[[], object]) -> Exception:
    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception) as info:  # noqa: PT011 (any)
        call()
    return info.value


@pytest.fixture(scope="module")
def s() -> State:
    return build(toys.trial(), rank=Rank())


def explained(error: Exception, s: State) -> str:
    with pytest.raises(ExperimentError) as info:
        explain(error, s, None)
    return str(info.value)


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
def test_cross_entropy_tells_what_it_got(s: State, outputs: Any, targets: Any, said: str) -> None:
    assert said in explained(raised(lambda: nn.CrossEntropyLoss()(outputs, targets)), s)


FITS = "gets outputs of shape (4, 3) (float32) and targets of shape (4, 2) (float32); give both the same shape"
TYPES = "(int64), but needs the same type for both; return targets.float() from the dataset"
LENGTHS = "of shape (2,) (float32) for outputs of shape (4, 3) (float32); set"


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: functional.mse_loss(CLASSES, torch.ones(4, 2)), FITS),
        (lambda: functional.binary_cross_entropy_with_logits(CLASSES, torch.ones(4, 2)), FITS),
        (lambda: functional.binary_cross_entropy(CLASSES, torch.ones(4, 2)), FITS),
        (lambda: functional.binary_cross_entropy(torch.ones(4), torch.ones(4).long()), TYPES),
        (lambda: functional.binary_cross_entropy_with_logits(torch.ones(4), torch.ones(4).long()), TYPES),
        (lambda: functional.cross_entropy(CLASSES, torch.tensor([0, 1, 2, 0]), torch.ones(2)), f"weight {LENGTHS}"),
        (
            lambda: functional.binary_cross_entropy_with_logits(CLASSES, CLASSES, pos_weight=torch.ones(2)),
            f"gets pos_weight {LENGTHS} pos_weight to a list with one number for each class",
        ),
    ],
)
def test_shapes_and_types_that_don_t_fit_are_told(s: State, fails: Callable[[], object], said: str) -> None:
    assert said in explained(raised(fails), s)


def test_other_errors_keep_torch_s_words(s: State) -> None:
    explain(raised(lambda: CLASSES @ CLASSES), s, None)


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
SPREAD = "gets outputs of shape (8,) (float64) and targets of shape (8, 1) (float64){}; return targets.squeeze(-1) from"


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss", "SoftMarginLoss"])
def test_a_loss_that_broadcasts_is_refused(name: str) -> None:
    """Most of torch's losses do so in silence, others with a warning that only the rank's log has."""
    said = refused(**FLAT, loss={"_target_": f"torch.nn.{name}"})
    assert said.startswith("loss: " + SPREAD.format(", which torch broadcasts to (8, 8)"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # as outside of tests
def test_a_loss_within_a_task_that_broadcasts_is_refused() -> None:
    said = refused(**FLAT, loss=None, task={"_target_": "toys.SquaredTask"})
    assert said.startswith("task: " + SPREAD.format(""))


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


def test_the_layer_of_an_error_has_its_name_in_the_model(s: State) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 1))
    assert hint(raised(lambda: model(torch.ones(2, 3)))).startswith("; in layer 1: Linear(in_features=7, out_feat")
    assert hint(raised(lambda: s.trainee((torch.ones(2, 4), 0)))).startswith("; in Linear(in_features=3, out_feat")


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
