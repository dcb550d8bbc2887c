"""Metrics that tests train with, apart from `toys` as torchmetrics takes seconds to import."""

import torch
from torch import Tensor
from torchmetrics import Metric


class Count(Metric):
    """How many samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return self.seen


class Parts(Metric):
    """The largest output minus the number of samples: of a list that isn't concatenated, and of a sum."""

    outputs: list[Tensor]
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx=None)
        self.add_state("seen", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs)
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return torch.cat(self.outputs).max() - self.seen


class Texts(Metric):
    """Computes what is no number."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> str:
        return "good"
