"""Optimizers that can't train a model here, refused before the first step with what to write instead."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import sparse_modules
from pipeline.training import optimizer_modes


def check(optimizer: Optimizer, *, again: Callable[[list[nn.Parameter]], Any], model: nn.Module) -> None:
    """Refuse an optimizer that calls the model itself, or that doesn't take the kinds of gradients that it will get.

    Args:
        optimizer: of the model's parameters.
        again: builds such an optimizer of other parameters.
        model: with all its parameters.

    Raises:
        ExperimentError: training can't begin with it.
    """
    _refuse_closure(optimizer)
    if sparse_modules(model) or isinstance(optimizer, SparseAdam):
        _refuse_gradients(again, model=model)


def check_averaging(optimizer: Optimizer, *, trial: Trial) -> None:
    """Refuse averages of weights beside an optimizer that has its own, such as a schedule-free one.

    Raises:
        ExperimentError: both would be averaged.
    """
    if not optimizer_modes.has_modes(optimizer):
        return
    name = type(optimizer).__name__
    if trial.experiment.train.ema is not None:
        raise ExperimentError.of("train.ema", f"averages the weights once more: {name} does so itself; remove it")
    if trial.options.get("local_sgd_period") is not None:
        raise ExperimentError.of(
            "optimizer",
            f"{name} keeps weights of its own on each worker, which local SGD doesn't average; use another optimizer, "
            "or remove local_sgd_period",
        )


def _refuse_closure(optimizer: Optimizer) -> None:
    """LBFGS and the like compute the loss several times in a step, on the same batch, in a function that they get."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ExperimentError.of(
            "optimizer",
            f"{type(optimizer).__name__} computes the loss several times in a step (its step() needs a closure), but a "
            "step here has one forward and backward pass over the global batch; use another, such as torch.optim.AdamW",
        )


def _refuse_gradients(again: Callable[[list[nn.Parameter]], Any], *, model: nn.Module) -> None:
    """Take a step with gradients of the same kinds, of two toy parameters."""
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
    optimizer_modes.train(optimizer)
    try:
        optimizer.step()
    except Exception as error:  # whatever an optimizer raises for gradients that it doesn't take
        whose = f"{', '.join(names[:3])} of the model (sparse: true)" if names else "no module of the model"
        raise ExperimentError.of(
            "optimizer",
            f"{type(optimizer).__name__} can't take the model's gradients: {' '.join(str(error).split())}. Those of "
            f"{whose} are sparse; write torch.optim.SGD or Adagrad without weight_decay, which take both kinds, or "
            "sparse: false",
        ) from error
