"""A network whose computing takes time but no core, as on a GPU, so that exchange and overlap alone are measured."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, LAYERS = 512, 6  # a MiB of gradients in each layer
FORWARD_S, BACKWARD_S = 0.001, 0.002  # for each sample, over all layers


class Sleeper(nn.Module):
    """Linear layers, each of which sleeps as long as a GPU would compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs: Tensor) -> Tensor:
        """Shapes (batch, WIDTH) both."""
        for layer in self.layers:
            inputs = layer(_Pause.apply(inputs))
        return inputs


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(context: object, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S * len(inputs) / LAYERS)
        return inputs.clone().requires_grad_()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S * len(gradient) / LAYERS)
        return gradient


def zeros(samples: int = 4096) -> tuple[TensorDataset, None]:
    """Inputs and targets of zeros, nothing to validate on."""
    return TensorDataset(torch.zeros(1, WIDTH).expand(samples, -1), torch.zeros(1, WIDTH).expand(samples, -1)), None
