"""A loss that the model computes itself, from batches that are mappings."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.tasks import FromModel

LABELS = torch.tensor([[1, 2, -100, -100], [3, 1, 2, -100]])
BATCH = {"input_ids": torch.arange(8).reshape(2, 4), "labels": LABELS}


class TinyForCausalLM(toys.LossOfItsOwn):
    """Compares each output with the next label."""

    config = SimpleNamespace()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(input_ids)["logits"]
        assert labels is not None
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TinyForConditionalGeneration(toys.LossOfItsOwn):
    """Compares each output of its decoder with the label of the same place."""

    config = SimpleNamespace(is_encoder_decoder=True)


class Sized(nn.Module):
    """Returns a loss without logits, as an object."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=(inputs - labels).square().mean())


FIRST = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 4, -100])}


@pytest.mark.parametrize(
    ("task", "model", "batch", "count", "labels"),
    [
        (FromModel(), toys.LossOfItsOwn(), BATCH, 5, LABELS),
        (FromModel(), TinyForConditionalGeneration(), BATCH, 5, LABELS),
        (FromModel(), TinyForCausalLM(), BATCH, 3, LABELS[:, 1:]),
        (FromModel(shifted=True), TinyForCausalLM(), BATCH, 3, LABELS[:, 1:]),
        (FromModel(), toys.LossOfItsOwn(), FIRST, 2, FIRST["labels"]),
    ],
    ids=["every label", "with an encoder", "all but the first, by its name", "... as told", "one label a sample"],
)
def test_labels_that_count_are_counted(
    task: FromModel, model: nn.Module, batch: dict[str, Tensor], count: int, labels: Tensor
) -> None:
    loss = task(model, batch)
    assert (loss.count, loss.outputs.shape) == (count, (labels.numel(), 5))
    assert loss.targets.tolist() == labels.flatten().tolist()
    torch.testing.assert_close(loss.sum, model(**batch)["loss"] * count)


def test_nothing_is_counted_where_no_label_counts() -> None:
    model = toys.LossOfItsOwn()
    loss = FromModel()(model, {**BATCH, "labels": torch.full((2, 4), -100)})
    assert (loss.sum, loss.count) == (0, 0)
    loss.sum.backward()
    assert all(bool((one.grad == 0).all()) for one in model.parameters())


@pytest.mark.parametrize(
    ("task", "model", "said"),
    [
        (FromModel(shifted=False), TinyForCausalLM(), "output with the next label, .*; set shifted: true"),
        (FromModel(shifted=True), toys.LossOfItsOwn(), "output with the same label, .*; set shifted: false"),
    ],
)
def test_a_count_that_is_not_that_of_the_loss_is_refused(task: FromModel, model: nn.Module, said: str) -> None:
    with pytest.raises(ExperimentError, match=rf"task\.shifted: the model compares each {said}"):
        task(model, BATCH)


def test_labels_that_are_floats_and_losses_without_labels_are_means_over_samples() -> None:
    batch = {"inputs": torch.rand(3), "labels": torch.rand(3)}
    loss = FromModel()(Sized(), batch)
    assert (loss.count, loss.targets) == (None, batch["labels"])
    torch.testing.assert_close(loss.sum, 3 * Sized()(**batch).loss)
    assert FromModel(labels="y").inputs({"x": batch["inputs"], "y": batch["labels"], "text": ["a"]}).keys() == {"x"}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((1, 2), r"data: a batch is a tuple of 2: int, int, not a mapping. Return mappings such as {input_ids"),
        ({"input_ids": torch.tensor([1])},
         "the model returned no loss, but logits, for a batch of input_ids, which has no labels"),
    ],
)  # fmt: skip
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
    assert outbox.files["model/example.pt"].keys() == {"input_ids"}
    assert outbox.files["model/example.pt"]["input_ids"].shape == (2, 6)
