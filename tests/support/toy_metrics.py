"""Metrics that tests train with, apart from `toys` as torchmetrics takes seconds to import."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Count(Metric):
    """How many samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return self.seen


class Undefined(Count):
    """Is NaN."""

    def compute(self) -> Tensor:
        return torch.tensor(float("nan"))


class TF32(Count):
    """Sets TF32 by the newer API."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]


class Ever(Count):
    """How many samples it has seen in all evaluations; ``persistent`` saves it."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.persistent(persistent)

    def reset(self) -> None:
        self._computed = None


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


class Each(Metric):
    """A number for each sample, of a column of the outputs and of a tensor that is expanded to the batch."""

    outputs: list[Tensor]
    sizes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", default=[], dist_reduce_fx="cat")
        self.add_state("sizes", default=[], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs[:, 0])
        self.sizes.append(torch.tensor(outputs.shape[1]).expand(len(outputs)))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.outputs) + dim_zero_cat(self.sizes)


class Texts(Metric):
    """Computes what is no number."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        pass

    def compute(self) -> str:
        return "good"


class Refusing(Count):
    """Takes no batch."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        raise ValueError("no such\ntargets")
