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


def entropy(outputs: Any, targets: Any) -> Callable[[], object]:
    return lambda: nn.CrossEntropyLoss()(outputs, targets)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (entropy(CLASSES, torch.tensor([0, 1, 2, 3])), "Targets are from 0 to 3, but 3 classes are numbered 0 to 2; "
         "give the model 4 outputs, or number the classes from 0"),
        (entropy(CLASSES, torch.tensor([-1, 2, -100, 1])), "Targets are from -1 to 2, but 3 classes are numbered 0 to "
         "2; number the classes from 0, or set ignore_index: -1 to ignore these targets"),
        (entropy(CLASSES, torch.zeros(4)), "targets of shape (4,) (float32), but class numbers must be int64; return "
         "targets.long() from the dataset"),
        (entropy(CLASSES, torch.zeros(4, 1, dtype=torch.int64)), "for 3 classes, targets must have the shape (4,)"),
        (entropy(CLASSES, torch.zeros(4, 3, dtype=torch.int64)), "needs the same type for both; return targets.float"),
        (entropy((CLASSES, None), torch.zeros(4)), "a tensor of outputs, but got a tuple of 2: Tensor (4, 3), NoneTyp"),
        (entropy(CLASSES, [0, 1, 2, 0]), "needs a tensor of targets, but got a list of 4: int, int, int, int; set `ta"),
        (lambda: functional.mse_loss(CLASSES, torch.ones(4, 2)), "gets outputs of shape (4, 3) (float32) and targets "
         "of shape (4, 2) (float32); give both the same shape"),
        (lambda: functional.binary_cross_entropy(torch.ones(4), torch.ones(4).long()), "(int64), but needs the same "
         "type for both; return targets.float() from the dataset"),
    ],
)  # fmt: skip
def test_losses_tell_what_they_got(s: State, fails: Callable[[], object], said: str) -> None:
    with pytest.raises(ExperimentError) as info:
        explain(raised(fails), s, None)
    assert said in str(info.value)


def test_other_errors_keep_torch_s_words(s: State) -> None:
    explain(raised(lambda: CLASSES @ CLASSES), s, None)
    explain(raised(lambda: functional.cross_entropy(CLASSES, torch.tensor([0, 1, 2, 0]), torch.ones(2))), s, None)


FLAT = {"model": {"_target_": "toys.flat_net"}}
SPREAD = "gets outputs of shape (8,) (float64) and targets of shape (8, 1) (float64); return targets.squeeze(-1) from"


@pytest.mark.filterwarnings("ignore::UserWarning")  # as outside of tests
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({**ENTROPY, "model": LINEAR}, "loss: gets outputs of shape (8, 2) (float64) and targets of shape (8,) (int64)"
         ". Targets are from 0 to 2, but 2 classes are numbered 0 to 1; give the model 3 outputs, or number the class"),
        ({**ENTROPY, "model": {"_target_": "torch.nn.LSTM", "input_size": 3, "hidden_size": 3}},
         "loss: needs a tensor of outputs, but got a tuple of 2: Tensor (8, 3), tuple; set `task:` to a class that"),
        # Most losses broadcast with a warning that only the rank's log has, the others in silence.
        *(({**FLAT, "loss": {"_target_": f"torch.nn.{name}"}}, f"loss: {SPREAD}")
          for name in ("MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss", "SoftMarginLoss")),
        ({**FLAT, "loss": None, "task": {"_target_": "toys.SquaredTask"}}, f"task: {SPREAD}"),
        ({"model": BILINEAR, "data": {"_target_": "toys.paired"}},
         "model: is called with one argument, the batch's inputs (a list of 2: Tensor (8, 3), Tensor (8, 3)), but "
         "Bilinear.forward() missing 1 required positional argument: 'input2'. Set `task:` to a class"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_experiment_is_refused_with_its_key(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ExperimentError) as info:
        toys.trained(**sections)
    assert str(info.value).startswith(said)


def test_what_broadcasts_to_no_more_elements_is_trained() -> None:
    """A sample alone: outputs of shape (1,) and targets of (1, 1) are one pair."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        result, _ = toys.trained(**FLAT, train={"global_batch_size": 1, "epochs": 1})
    assert result.losses


def double_targets() -> Any:
    return functional.huber_loss(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: nn.Embedding(4, 2)(torch.tensor([4])), "; in Embedding(4, 2); compare the index with num_embeddings"),
        (lambda: double_targets().backward(), "; return targets.float() from the dataset"),
        (lambda: nn.Linear(2, 1)(torch.ones(3, 2, dtype=torch.float64)), "; inputs and weights have different types"),
        (lambda: nn.Conv1d(2, 1, 1)(torch.ones(3, 2, 4).byte()), "; inputs and weights have different types"),
        (lambda: nn.LayerNorm(2)(torch.ones(3, 2, dtype=torch.float64)), "; inputs and weights have different types"),
        (lambda: CLASSES @ CLASSES, ""),
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
