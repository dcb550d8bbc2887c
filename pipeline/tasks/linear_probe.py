"""Linear probe, the usual measure of learned features: how well a linear classifier tells classes apart by them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override


class LinearProbe(Metric):  # type: ignore[misc]  # torchmetrics is not followed, see pyproject.toml
    """Accuracy of a ridge regression on one-hot classes, leave-one-out: each sample is predicted by all others.

    The prediction without a sample follows from the fit with it, in closed form, so features are fitted once. Source:
    Hastie, Tibshirani and Friedman 2009, The Elements of Statistical Learning, section 7.10.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    features: list[Tensor]
    targets: list[Tensor]

    def __init__(self, *, num_classes: int, penalty: float = 1.0, **more: Any) -> None:
        """Set the number of classes, and the ridge penalty on weights of features with standard deviation 1."""
        super().__init__(**more)
        self._classes, self._penalty = num_classes, penalty
        self.add_state("features", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    @override
    def update(self, features: Tensor, targets: Tensor) -> None:
        """Add features (batch, width) and classes (batch,)."""
        self.features.append(features.detach().double())
        self.targets.append(targets)

    @override
    def compute(self) -> Tensor:
        """Return the accuracy, scalar."""
        features, targets = dim_zero_cat(self.features), dim_zero_cat(self.targets)
        scaled = (features - features.mean(0)) / features.std(0).clamp(min=1e-9)
        wanted = functional.one_hot(targets, self._classes).to(scaled.dtype)
        inputs = torch.cat([scaled, scaled.new_ones(len(scaled), 1)], dim=1)
        penalties = torch.full_like(inputs[0], self._penalty)
        penalties[-1] = 1e-9  # the intercept
        solved = torch.linalg.solve(inputs.T @ inputs + penalties.diag(), inputs.T)
        leverage = (inputs * solved.T).sum(1, keepdim=True)
        fitted = inputs @ (solved @ wanted)
        left_out = wanted - (wanted - fitted) / (1 - leverage).clamp(min=1e-9)
        accuracy: Tensor = (left_out.argmax(1) == targets).float().mean()
        return accuracy
