"""torch's fused optimizers: one kernel for many parameters, where the default takes several for each of them."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from pipeline.config.values import Component

_FUSED = {"torch.optim.Adam": True, "torch.optim.AdamW": True, "torch.optim.SGD": False}
"""Those that torch has fused for CPU and for GPUs, and whether also for sharded parameters and scaled losses: a first
step that the scaler leaves out gives SGD a momentum that nobody has written."""
_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments by which a file chooses an implementation itself, or one that can't be fused."""


def preferred(optimizer: Component, *, model: nn.Module, is_sharded: bool, is_scaled: bool) -> Component:
    """The optimizer with ``fused: true``, if that can be done and the file doesn't choose for itself.

    Args:
        optimizer: as the file has it.
        model: whose parameters it gets.
        is_sharded: whether each rank has a part of each parameter only.
        is_scaled: whether a scaler keeps gradients from underflowing, as for fp16.
    """
    arguments = optimizer.arguments
    if optimizer.target not in _FUSED or any(choice in arguments for choice in _CHOICES):
        return optimizer
    if (is_sharded or is_scaled) and not _FUSED[optimizer.target]:
        return optimizer
    if arguments.get("dampening"):  # see `complete`
        return optimizer
    if not all(parameter.is_floating_point() for parameter in model.parameters() if parameter.requires_grad):
        return optimizer
    if any(getattr(module, "sparse", False) for module in model.modules()):  # embeddings with sparse gradients
        return optimizer
    return optimizer.model_copy(update={"fused": True})


def complete(optimizer: Optimizer) -> None:
    """Let a fused SGD begin with a momentum of 0 for every parameter, which without dampening is what it begins with.

    By itself it makes them when gradients come, and fails on a parameter whose first gradient comes later than others'.
    """
    if isinstance(optimizer, SGD) and any(group["fused"] and group["momentum"] for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_with_all_momenta)


def _with_all_momenta(optimizer: Optimizer, *_: Any) -> None:
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
