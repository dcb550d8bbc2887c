"""A loss that the model computes itself, from batches that are mappings."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from typing import Any

import pytest
import torch
import toys
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.tasks import FromModel

LABELS = torch.tensor([[1, 2, -100, -100], [3, 1, 2, -100]])
BATCH = {"input_ids": torch.arange(8).reshape(2, 4), "labels": LABELS}


class Config:
    def __init__(self, *, is_encoder_decoder: bool = False) -> None:
        self.is_encoder_decoder = is_encoder_decoder


class TinyForCausalLM(toys.LossOfItsOwn):
    """Compares each output with the next label."""

    config = Config()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids)["logits"]
        assert labels is not None
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TinyForConditionalGeneration(toys.LossOfItsOwn):
    """Compares each output of its decoder with the label of the same place."""

    config = Config(is_encoder_decoder=True)


class Sized(nn.Module):
    """Returns a loss without logits, as an object."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        self.loss = (inputs - labels).square().mean()
        return self


def test_it_is_weighted_by_the_labels_that_count() -> None:
    model = toys.LossOfItsOwn()
    output = FromModel()(model, BATCH)

    assert output.weight == 5
    assert output.outputs.shape == (8, 5)
    assert output.targets.tolist() == LABELS.flatten().tolist()
    assert torch.equal(output.loss, model(**BATCH)["loss"])


@pytest.mark.parametrize("task", [FromModel(), FromModel(shifted=True)], ids=["by its name", "as told"])
def test_the_first_label_of_a_language_model_does_not_count(task: FromModel) -> None:
    output = task(TinyForCausalLM(), BATCH)

    assert output.weight == 3
    assert output.outputs.shape == (6, 5)
    assert output.targets.tolist() == LABELS[:, 1:].flatten().tolist()


@pytest.mark.parametrize(
    ("task", "model", "said"),
    [
        (FromModel(shifted=False), TinyForCausalLM(), "output with the next label, .*; set shifted: true"),
        (FromModel(shifted=True), toys.LossOfItsOwn(), "output with the same label, .*; set shifted: false"),
    ],
)
def test_a_weight_that_is_not_that_of_the_loss_is_refused(task: FromModel, model: nn.Module, said: str) -> None:
    with pytest.raises(ExperimentError, match=rf"task\.shifted: the model compares each {said}"):
        task(model, BATCH)


def test_with_an_encoder_it_does() -> None:
    assert FromModel()(TinyForConditionalGeneration(), BATCH).weight == 5


def test_a_label_for_each_sample_counts_each_sample() -> None:
    labels = torch.tensor([1, 4, -100])
    output = FromModel()(toys.LossOfItsOwn(), {"input_ids": torch.tensor([1, 2, 3]), "labels": labels})

    assert output.weight == 2
    assert output.outputs.shape == (3, 5)


def test_labels_that_are_floats_and_losses_without_labels_are_means_over_samples() -> None:
    batch = {"inputs": torch.rand(3), "labels": torch.rand(3)}
    output = FromModel()(Sized(), batch)

    assert output.weight is None
    assert output.targets is batch["labels"]
    assert FromModel(labels="y").inputs({"x": batch["inputs"], "y": batch["labels"], "text": ["a"]}).keys() == {"x"}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((1, 2), r"data: a batch is a tuple of 2: int, int, not a mapping. Return mappings such as {input_ids"),
        (
            {"input_ids": torch.tensor([1])},
            "the model returned no loss, but logits, for a batch of input_ids, which has no labels",
        ),
    ],
)
def test_what_it_cannot_use_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        FromModel()(toys.LossOfItsOwn(), batch)


def test_metrics_see_logits_and_labels() -> None:
    accuracy = {
        "_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 5, "ignore_index": -100,
        "average": "micro",
    }  # fmt: skip
    result, outbox = toys.trained(
        model={"_target_": "toys.LossOfItsOwn"},
        data={"_target_": "toys.sequences"},
        loss=None,
        task={"_target_": "pipeline.tasks.FromModel"},
        metrics={"accuracy": accuracy},
        optimizer={"_target_": "torch.optim.SGD", "lr": 1.0},
        train={"epochs": 8},
    )

    assert result.metrics["validation/accuracy"] > 0.5
    assert outbox.files["model/example.pt"]["input_ids"].shape == (2, 6)
    assert outbox.files["model/example.pt"].keys() == {"input_ids"}
