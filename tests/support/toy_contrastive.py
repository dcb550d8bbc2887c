"""Contrastive data and tasks, whose losses compare all samples of a global batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from pipeline.tasks import Loss, gathered

STOPPED = 4  # Step within the second epoch of 3 steps, whose last batches have 2 samples for up to 4 workers
SAMPLES = 18  # The last global batch of 8 has 2 samples, fewer than 4 workers


def pairs() -> tuple[TensorDataset, TensorDataset]:
    """Views of shape (2, 3) and classes; with batches of 8 neither set is divided evenly."""
    return _pairs(SAMPLES), _pairs(11)


def _pairs(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    points = torch.randn(samples, 1, 3, generator=generator)
    views = points + 0.3 * torch.randn(samples, 2, 3, generator=generator)
    return TensorDataset(views, (points[:, 0, 0] > 0).long())


class Similar:
    """InfoNCE of two views in one direction, with a temperature that is learned."""

    def __init__(self) -> None:
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        views, targets = batch
        first, second = (gathered(model(view)) for view in views.unbind(1))
        logits = first @ second.T / self.temperature
        loss = cross_entropy(logits, torch.arange(len(first)))
        return Loss(loss * len(targets), None, views[:, 0], targets, {"rows": torch.tensor(float(len(first)))})


class Both(Similar):
    """Both directions and the labels; gathers in the order of the batch again and again."""

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        views, targets = batch
        labels = gathered(targets)
        first, second = gathered(model(views.flatten(0, 1)).unflatten(0, (-1, 2))).unbind(1)
        rows = normalize(torch.cat([first, second]))
        similarity = (rows @ rows.T / self.temperature).fill_diagonal_(-torch.inf)
        loss = cross_entropy(similarity, torch.arange(len(rows)).roll(len(first)))
        return Loss(loss * (1 + labels.double().mean()) * len(targets), None, views[:, 0], targets)


class ByView(Similar):
    """Gathers a row for each view, not for each sample."""

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(gathered(model(batch[0].flatten(0, 1))).square().mean() * len(batch[1]), None, *batch)


class InEvaluation(Similar):
    """Gathers in evaluation only, and with more samples than the check has."""

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        rows = model(batch[0][:, 0])
        rows = rows if torch.is_grad_enabled() or len(rows) < 6 else gathered(rows)
        return Loss(rows.square().mean() * len(batch[1]), None, *batch)


class OwnAgainstAll(Similar):
    """Own samples of one class against all, ``weighted`` by them or over all samples; a rank may have none."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        views, targets = batch
        rows, labels = gathered(model(views[:, 0])), gathered(targets)
        own, counted = model(views[:, 1]) / self.temperature, targets == 0
        if not (self.weighted or counted.any()):  # a branch that depends on none of the gathered rows
            return Loss(0 * own.sum(), None, views[:, 0], targets)
        likely = torch.where(targets[:, None] == labels, (own @ rows.T).log_softmax(1), 0).sum(1)
        loss = -torch.where(counted, likely, 0).sum()
        return Loss(loss, counted.sum() if self.weighted else None, views[:, 0], targets)


def case(task: str, **arguments: Any) -> dict[str, Any]:
    """Return the sections of an experiment with one of the tasks."""
    return {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 4},
        "data": {"_target_": "toy_contrastive.pairs"},
        "loss": None,
        "task": {"_target_": f"toy_contrastive.{task}", **arguments},
    }


CASES = {
    "similar": case("Similar") | {"train": {"clip_grad_norm": 0.5}},
    "both": case("Both") | {"train": {"clip_grad_norm": 0.5}},
    "weighted": case("OwnAgainstAll", weighted=True),
    "branching": case("OwnAgainstAll", weighted=False),
}


class Late(Similar):
    """Compares the rank's own rows in its first batch, and gathers in all others."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        views, targets = batch
        self.batches += model.training
        found = [model(view) for view in views.unbind(1)]
        first, second = found if self.batches < 2 else map(gathered, found)
        loss = (first - second).square().mean() * self.temperature
        return Loss(loss * len(targets), None, views[:, 0], targets)
