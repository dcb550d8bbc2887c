"""The user's optimizer: fused where torch can, refused before the first step where it can't train the model.

Some have ``train()`` and ``eval()`` and train other weights than those of the result. Schedule-free optimizers do:
Defazio et al. 2024, "The Road Less Scheduled", arXiv 2405.15682. They take gradients at an interpolated point, while
evaluation and export use an average. Outside of `evaluating` they are in training mode.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

from pipeline.config.finetuning import Optimizer as Declared
from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import sparse_modules
from pipeline.training.ranks.norms import local

_FUSED = {"torch.optim.Adam": True, "torch.optim.AdamW": True, "torch.optim.SGD": False}
"""Optimizers that torch has fused for CPU and GPU; True if sharded parameters and scaled losses work, too. SGD's
momentum would be uninitialized after a first step that the gradient scaler skips."""
_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments with which a file chooses an implementation itself, or one that can't be fused."""


def check(optimizer: Optimizer, *, again: Callable[[list[nn.Parameter]], Any], model: nn.Module) -> None:
    """Refuse an optimizer that needs a closure, or that doesn't take the model's kinds of gradients (dense, sparse).

    Args:
        optimizer: the optimizer of the model's parameters.
        again: builds the same optimizer for other parameters.
        model: the model with all its parameters.

    Raises:
        ExperimentError: the optimizer can't train this model.
    """
    _refuse_closure(optimizer)
    if sparse_modules(model) or isinstance(optimizer, SparseAdam):
        _refuse_gradients(again, model=model)


def check_averaging(optimizer: Optimizer, *, trial: Trial) -> None:
    """Refuse averaging of weights with an optimizer that averages them itself, such as a schedule-free one.

    Raises:
        ExperimentError: the weights would be averaged twice.
    """
    if not has_modes(optimizer):
        return
    name = type(optimizer).__name__
    if trial.experiment.train.ema is not None:
        raise ExperimentError.of("train.ema", f"averages the weights, but {name} also does; remove train.ema")


def _refuse_closure(optimizer: Optimizer) -> None:
    """Refuse LBFGS and the like, which evaluate the loss several times in a step through a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ExperimentError.of(
            "optimizer",
            f"the step() of {type(optimizer).__name__} needs a closure, which is not supported. Use an optimizer that "
            "needs one forward and backward pass, e.g. torch.optim.AdamW.",
        )


def _refuse_gradients(again: Callable[[list[nn.Parameter]], Any], *, model: nn.Module) -> None:
    """Take a step on toy parameters with the model's kinds of gradients, to see whether the optimizer accepts them."""
    names = sparse_modules(model)
    owned = {id(model.get_submodule(name).weight) for name in names}
    gradients: list[Tensor] = []
    if any(id(one) in owned for one in model.parameters() if one.requires_grad):
        gradients.append(torch.ones(2, 2).to_sparse(1))
    if any(id(one) not in owned for one in model.parameters() if one.requires_grad):
        gradients.append(torch.ones(2, 2))
    parameters = [nn.Parameter(torch.zeros(2, 2)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = again(parameters)
    train(optimizer)
    try:
        optimizer.step()
    except Exception as error:  # an optimizer may raise anything
        whose = f"{', '.join(names[:3])} (sparse: true)" if names else "none"
        raise ExperimentError.of(
            "optimizer",
            f"{type(optimizer).__name__} does not support the model's gradients: {' '.join(str(error).split())}. "
            f"Sparse gradients: {whose}. Use torch.optim.SGD or Adagrad without weight_decay, which support dense and "
            "sparse gradients, or set sparse: false.",
        ) from error


def has_modes(optimizer: Optimizer) -> bool:
    """Return True if the optimizer has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def train(optimizer: Optimizer) -> None:
    """Put the optimizer into training mode, if it has modes."""
    if has_modes(optimizer):
        cast(Any, optimizer).train()


@contextmanager
def evaluating(optimizer: Optimizer) -> Iterator[None]:
    """Put the optimizer into evaluation mode inside the block, if it has modes."""
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
    """Restore the weights of an optimizer with modes after the block, exactly: switching modes back would round.

    Otherwise a training would depend on when it was evaluated.
    """
    weights = [one for group in optimizer.param_groups for one in group["params"]] if has_modes(optimizer) else []
    kept = [local(one.detach()).clone() for one in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for own, before in zip(weights, kept, strict=True):
                local(own).copy_(before)


def prefer_fused(optimizer: Declared, *, model: nn.Module, is_sharded: bool, is_scaled: bool) -> Declared:
    """Return the optimizer with ``fused: true``, if torch supports it and the file doesn't choose an implementation.

    Args:
        optimizer: the section of the file.
        model: the model that it will train.
        is_sharded: true if each rank holds only a shard of each parameter.
        is_scaled: true if a gradient scaler is used, as for fp16.
    """
    settings = [optimizer.arguments, *(group.settings for group in optimizer.groups)]
    if optimizer.target not in _FUSED or any(choice in each for each in settings for choice in _CHOICES):
        return optimizer
    if (is_sharded or is_scaled) and not _FUSED[optimizer.target]:
        return optimizer
    if any(each.get("dampening") for each in settings):  # see `complete`
        return optimizer
    if not all(parameter.is_floating_point() for parameter in model.parameters() if parameter.requires_grad):
        return optimizer
    if any(getattr(module, "sparse", False) for module in model.modules()):  # embeddings with sparse gradients
        return optimizer
    return optimizer.model_copy(update={"fused": True})


def complete(optimizer: Optimizer) -> None:
    """Initialize the momentum of a fused SGD to 0, which is equivalent as long as there is no dampening.

    By itself it creates momentum with the first gradients, and fails on a parameter that gets one in a later step.
    """
    if isinstance(optimizer, SGD) and any(group["fused"] and group["momentum"] for group in optimizer.param_groups):
        optimizer.register_step_pre_hook(_with_all_momenta)


def _with_all_momenta(optimizer: Optimizer, *_: Any) -> None:
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
