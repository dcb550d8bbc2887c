"""Contrastive learning of representations: views of one sample attract each other, those of other samples repel."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.tasks import StepOutput, Task, gathered


class Contrastive(Task):
    """NT-Xent, the loss of SimCLR, over the whole global batch on any number of workers.

    For batches of (first views, second views, targets), and a model that returns (features, projections) such as
    `pipeline.models.SimCLR`. Targets are not trained on. Metrics see the features (batch, width) of the first views and
    the targets. Source: Chen et al. 2020, arXiv 2002.05709.
    """

    def __init__(self, *, temperature: float = 0.5) -> None:
        """Set the ``temperature`` that similarities are divided by.

        Raises:
            ExperimentError: it isn't positive.
        """
        if temperature <= 0:
            raise ExperimentError.of("task.temperature", f"is {temperature}; write a number above 0")
        self._temperature = temperature

    @override
    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> StepOutput:
        """Compute the loss of (first views, second views, targets)."""
        first, second, targets = batch
        features, projections = model(torch.cat([first, second]))
        views = gathered(torch.stack(projections.chunk(2), dim=1)).unbind(1)
        return StepOutput(nt_xent(*views, temperature=self._temperature), features[: len(first)], targets)


def nt_xent(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Compute the normalized temperature-scaled cross entropy of two views, shape (samples, width) each: a scalar.

    Each of the 2 * samples rows is classified by its cosine similarity to all other rows; its class is the other view
    of the same sample.
    """
    rows = functional.normalize(torch.cat([first, second]), dim=1)
    similarity = rows @ rows.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(rows), dtype=torch.bool, device=rows.device), -torch.inf)
    partners = torch.arange(len(rows), device=rows.device).roll(len(first))
    return functional.cross_entropy(similarity, partners)
