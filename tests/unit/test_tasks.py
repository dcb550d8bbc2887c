"""What a step computes from a batch, and what is said when it can't."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ExperimentError
from pipeline.models import GPT
from pipeline.tasks import LanguageModel, Supervised


@pytest.mark.parametrize("pair", [tuple, list])
def test_supervised_is_the_loss_of_the_model(pair):
    model, inputs, targets = nn.Linear(3, 4), torch.randn(5, 3), torch.randint(4, (5,))

    step = Supervised(nn.CrossEntropyLoss())(model, pair((inputs, targets)))

    assert step.loss == functional.cross_entropy(model(inputs), targets)
    assert torch.equal(step.outputs, model(inputs))
    assert step.targets is targets


def test_supervised_loss_reaches_the_parameters():
    model = nn.Linear(3, 1)

    Supervised(nn.MSELoss())(model, (torch.randn(5, 3), torch.randn(5, 1))).loss.backward()

    assert model.weight.grad.abs().sum() > 0


def test_supervised_takes_a_plain_function_as_loss():
    step = Supervised(functional.l1_loss)(nn.Identity(), (torch.zeros(2), torch.ones(2)))

    assert step.loss == 1


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_class_weights_of_another_type(kind):
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1, 5, 1], dtype=kind))

    step = Supervised(loss)(nn.Identity(), (outputs, targets))

    assert step.loss == functional.cross_entropy(outputs, targets, torch.tensor([1.0, 5.0, 1.0]))


def test_supervised_trains_a_transformers_model():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = ResNetForImageClassification(config)

    step = Supervised(nn.CrossEntropyLoss())(model, (torch.randn(2, 1, 32, 32), torch.tensor([0, 2])))
    step.loss.backward()

    assert step.outputs.shape == (2, 3)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (torch.zeros(4, 3), r"a batch is a tensor of shape \(4, 3\), not \(inputs, targets\)"),
        ({"pixels": torch.zeros(1), "label": torch.zeros(1)}, r"a batch is a mapping with the keys pixels, label"),
        ((torch.zeros(1),) * 3, r"a batch has 3 parts, not \(inputs, targets\)"),
        ("text", r"a batch is of type str"),
    ],
)
@pytest.mark.parametrize("task", [Supervised(nn.CrossEntropyLoss()), LanguageModel()], ids=["supervised", "language"])
def test_a_batch_that_is_no_pair_is_refused(task, batch, what):
    with pytest.raises(ExperimentError, match=what + r".*set `task:`") as caught:
        task(nn.Identity(), batch)

    assert caught.value.problems[0].key == "data"


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_refused(reduction):
    with pytest.raises(ExperimentError, match=f"loss: reduction '{reduction}' .* set reduction: mean"):
        Supervised(nn.CrossEntropyLoss(reduction=reduction))


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.zeros(2), r"is a tensor of shape \(2,\), not a scalar"), (0.5, "is of type float, not a scalar")],
)
def test_a_loss_that_is_no_scalar_is_refused(value, what):
    task = Supervised(lambda outputs, targets: value)

    with pytest.raises(ExperimentError, match=f"loss: {what}"):
        task(nn.Identity(), (torch.zeros(2), torch.zeros(2)))


def test_language_model_is_the_mean_over_all_tokens():
    model = GPT(16, context_length=6, width=8, depth=1, heads=2)
    tokens, next_tokens = torch.randint(16, (2, 3, 6)).unbind()

    step = LanguageModel()(model, (tokens, next_tokens))

    each = functional.cross_entropy(model(tokens).transpose(1, 2), next_tokens, reduction="none")
    torch.testing.assert_close(step.loss, each.mean())
    assert step.outputs.shape == (18, 16)
    assert torch.equal(step.targets, next_tokens.flatten())
