"""What a task computes from a batch, and what is said when it can't."""

# promise: losses weighted by tokens or class weights; other losses are refused

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import ExperimentError
from pipeline.models import GPT
from pipeline.tasks import LanguageModel, Loss, Supervised, Trainee, count_samples

WEIGHTS = torch.tensor([1.0, 5.0, 0.5])


@pytest.mark.parametrize("pair", [tuple, list])
def test_supervised_is_the_loss_of_the_model(pair: Any) -> None:
    model, inputs, targets = nn.Linear(3, 4), torch.randn(5, 3), torch.randint(4, (5,))
    loss = Supervised(nn.CrossEntropyLoss())(model, pair((inputs, targets)))
    assert (loss.sum, loss.count) == (functional.cross_entropy(model(inputs), targets, reduction="sum"), None)
    assert torch.equal(loss.outputs, model(inputs))
    assert loss.targets is targets
    loss.sum.backward()
    assert model.weight.grad is not None


def test_the_loss_of_a_transformers_model_is_that_of_its_logits() -> None:
    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(inputs))

    loss = Supervised(nn.CrossEntropyLoss())(Model(3, 2), (torch.randn(2, 3), torch.tensor([0, 1])))
    assert loss.outputs.shape == (2, 2)


@pytest.mark.parametrize(
    ("loss", "targets", "count"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0, 2]), None),
        (nn.CrossEntropyLoss(), torch.tensor([[0, -100, 1], [1, 2, -100]]), 4),
        (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([0, 2]), 1),
        (nn.CrossEntropyLoss(weight=WEIGHTS.double()), torch.tensor([0, 2]), 1.5),
        (nn.CrossEntropyLoss(weight=torch.tensor([1, 5, 1])), torch.tensor([0, 1]), 6),
        (nn.CrossEntropyLoss(weight=WEIGHTS), torch.eye(3)[:2], None),
        (nn.CrossEntropyLoss(weight=WEIGHTS), torch.ones(2, 3, 2) / 3, 4),
        (nn.NLLLoss(weight=WEIGHTS), torch.tensor([-100, 1]), 5),
        (nn.MSELoss(), torch.zeros(2, 3), None),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1, 2, 3])), torch.zeros(2, 3), None),
    ],
)
def test_the_count_is_what_torch_divides_by(loss: Any, targets: Tensor, count: float | None) -> None:
    places = targets.shape[2:] if targets.is_floating_point() else targets.shape[1:]
    outputs = torch.randn(2, 3, *places, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    found = Supervised(loss)(nn.Identity(), (outputs, targets))
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        loss.reduction = "mean"
    assert found.count == count
    torch.testing.assert_close(found.sum / (2 if found.count is None else found.count), loss(outputs, targets))


def test_language_model_is_the_mean_over_all_tokens_but_padding() -> None:
    model = GPT(16, context_length=6, width=8, depth=1, heads=2)
    tokens, targets = torch.randint(16, (2, 3, 6)).unbind()
    targets[1:, 4:] = -100
    loss = LanguageModel()(model, (tokens, targets))
    torch.testing.assert_close(loss.sum / loss.count, functional.cross_entropy(model(tokens).transpose(1, 2), targets))
    assert (loss.count, loss.outputs.shape) == (14, (18, 16))
    assert torch.equal(loss.targets, targets.flatten())


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (torch.zeros(4, 3), r"a batch is a tensor of shape \(4, 3\), not \(inputs, targets\)"),
        ({"pixels": torch.zeros(1), "label": torch.zeros(1)}, r"a batch is a mapping with the keys pixels, label"),
        ((torch.zeros(1),) * 3, r"a batch is a tuple of 3: .*, not \(inputs, targets\)"),
    ],
)
@pytest.mark.parametrize("task", [Supervised(nn.CrossEntropyLoss()), LanguageModel()], ids=["supervised", "language"])
def test_a_batch_that_is_no_pair_is_refused(task: Any, batch: Any, what: str) -> None:
    with pytest.raises(ExperimentError, match=f"data: {what}.*set `task:`"):
        task(nn.Identity(), batch)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_refused(reduction: str) -> None:
    with pytest.raises(ExperimentError, match=f"loss: reduction '{reduction}' .* set reduction: mean"):
        Supervised(nn.CrossEntropyLoss(reduction=reduction))


def test_ignored_labels_must_be_declared() -> None:
    """Only then are the others counted, which takes an exchange."""
    batch = torch.randn(3, 4), torch.tensor([0, -100, 2])
    with pytest.raises(ExperimentError, match=r"loss: some targets are -100, .* Set ignore_index: -100"):
        Supervised(nn.CrossEntropyLoss())(nn.Identity(), batch)
    assert Supervised(nn.CrossEntropyLoss(), ignores=True)(nn.Identity(), batch).count == 2


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.zeros(2), r"is a tensor of shape \(2,\), not a scalar"), (0.5, "is of type float, not a scalar")],
)
def test_a_loss_that_is_no_scalar_is_refused(value: Any, what: str) -> None:
    with pytest.raises(ExperimentError, match=f"loss: {what}"):
        Supervised(lambda outputs, targets: value)(nn.Identity(), (torch.zeros(2), torch.zeros(2)))


# What a task returns

ONE, ROW = torch.ones(()), torch.ones(1)


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (ROW, r"returned a tensor of shape \(1,\); return Loss\(sum, count\), or a scalar, the mean over the samples"),
        ((ONE, ONE), r"returned a tuple; return Loss"),
        (Loss(ROW), r"returned a tensor of shape \(1,\) as Loss\.sum; it must be a scalar tensor"),
        (Loss(ONE, ROW), r"returned a tensor of shape \(1,\) as Loss\.count; it must be a scalar tensor"),
        (Loss(ONE, 3), r"returned a int as Loss\.count"),  # type: ignore[arg-type]
        (Loss(ONE, logs=[ONE]), r"Loss\.logs is a list of 1: Tensor \(\), not a mapping from names"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_loss_is_refused(returned: Any, what: str) -> None:
    with pytest.raises(ExperimentError, match=f"task: {what}"):
        Trainee(nn.Identity(), lambda model, batch: returned)([ROW])


def test_a_count_of_some_batches_only_is_refused() -> None:
    trainee = Trainee(nn.Identity(), lambda model, batch: Loss(ONE, ONE if len(batch) > 1 else None))
    trainee(torch.ones(2))
    with pytest.raises(
        ExperimentError, match=r"task: returns Loss\.count for some batches and None for others; return"
    ):
        trainee(ROW)


def test_a_scalar_alone_is_the_mean_over_the_samples() -> None:
    assert Trainee(nn.Identity(), lambda model, batch: torch.tensor(0.5))({"x": torch.ones(4, 2)}).sum == 2


@pytest.mark.parametrize(
    "batch",
    [torch.ones(3, 2), [0, torch.ones(3)], {"size": ONE, "x": torch.ones(3, 1)}, ({"x": torch.ones(3)}, 1), ([1] * 3,)],
)
def test_samples_are_the_rows_of_a_batch(batch: Any) -> None:
    assert count_samples(batch) == 3


def test_after_a_failed_pass_no_batch_is_taken_for_its_own() -> None:
    with pytest.raises(LookupError):
        toys.trained(model={"_target_": "toys.BrokenModel"})
    assert count_samples(torch.ones(3)) == 3


def test_a_batch_without_rows_needs_a_count() -> None:
    with pytest.raises(
        ExperimentError, match=r"task: a batch is of type str, whose samples can't be counted; return L"
    ):
        count_samples("text")


def test_what_metrics_get_has_no_graph_and_is_kept_where_they_do() -> None:
    trainee = Trainee(nn.Linear(3, 1), lambda model, batch: Loss((o := model(batch)).sum(), None, {"o": [o]}, (o,)))
    assert trainee(torch.ones(2, 3)).outputs is None
    trainee.keeps_outputs = True
    loss = trainee(torch.ones(2, 3))
    assert loss.sum.requires_grad
    assert not loss.outputs["o"][0].requires_grad
    assert not loss.targets[0].requires_grad
