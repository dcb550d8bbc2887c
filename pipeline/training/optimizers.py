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

from pipeline.config.values import Component
from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Trial
from pipeline.strategies.base import sparse_modules
from pipeline.training.norms import local

_FUSED = {"torch.optim.Adam": True, "torch.optim.AdamW": True, "torch.optim.SGD": False}
"""Those that torch has fused for CPU and for GPUs, and whether also for sharded parameters and scaled losses: a first
step that the scaler leaves out gives SGD a momentum that nobody has written."""
_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments by which a file chooses an implementation itself, or one that can't be fused."""


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
    if not has_modes(optimizer):
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
    train(optimizer)
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


def prefer_fused(optimizer: Component, *, model: nn.Module, is_sharded: bool, is_scaled: bool) -> Component:
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
