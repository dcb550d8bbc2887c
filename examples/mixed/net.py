"""The model and the data: the same file before and after."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """Images of 64 pixels to scores of ten digits."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """A training and a validation set."""
    pixels, targets = load_digits(return_X_y=True)
    both = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(targets))
    return TensorDataset(*both[:1438]), TensorDataset(*both[1438:])
