"""Optimizers with ``train()`` and ``eval()``, which train other weights than those of the result.

Schedule-free ones do: Defazio et al. 2024, "The Road Less Scheduled", arXiv 2405.15682. Gradients are taken where the
weights are in between, and what is evaluated and exported is an average. Outside of `evaluating` they train.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.optim import Optimizer

from pipeline.training.norms import local


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def train(optimizer: Optimizer) -> None:
    """Put the optimizer into its training mode, if it has modes."""
    if has_modes(optimizer):
        cast(Any, optimizer).train()


@contextmanager
def evaluating(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the weights are those that the optimizer has for its result."""
    if not has_modes(optimizer):
        yield
        return
    with weights_kept(optimizer):
        cast(Any, optimizer).eval()
        try:
            yield
        finally:
            train(optimizer)


@contextmanager
def weights_kept(optimizer: Optimizer) -> Iterator[None]:
    """Put the weights of an optimizer with modes back, to the bit: computing them from the others again would round.

    So a training doesn't depend on when it was evaluated.
    """
    weights = [one for group in optimizer.param_groups for one in group["params"]] if has_modes(optimizer) else []
    kept = [local(one.detach()).clone() for one in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for own, before in zip(weights, kept, strict=True):
                local(own).copy_(before)
