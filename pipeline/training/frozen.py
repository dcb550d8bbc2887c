"""Frozen parameters: neither trained nor exchanged, bit-equal at the end of a training.

Without a gradient they are unknown to DDP, and the optimizer, which would let them decay, isn't given them. BatchNorm
whose parameters are all frozen stays in evaluation mode: its statistics belong to the weights that it was trained with.
"""

from collections.abc import Sequence
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ExperimentError, Problem
from pipeline.training.learned import PREFIX
from pipeline.training.parameter_names import Named, listed, matches, unmatched, with_aliases, without_match

_KEY = "train.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of a model whose names match, before a strategy wraps it.

    Raises:
        ExperimentError: a pattern matches nothing, or nothing is left to train.
    """
    if not patterns:
        return
    named = with_aliases(model)
    if missing := without_match(patterns, list(named)):
        raise ExperimentError(
            [Problem(f"{_KEY}[{patterns.index(one)}]", unmatched(one, list(named))) for one in missing]
        )
    for name, parameter in named.items():
        if matches(patterns, name):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ExperimentError.of(_KEY, f"{', '.join(patterns)} freezes all parameters; leave some to train")


def find_trainable(model: nn.Module, learned: nn.Module | None) -> Named:
    """Return the parameters of model and task (``learned``) that require a gradient, by name."""
    task = learned.named_parameters() if learned is not None else ()
    named = [*model.named_parameters(), *((f"{PREFIX}{name}", one) for name, one in task)]
    return {name: one for name, one in named if one.requires_grad}


def check_unchanged(known: Named, *, model: nn.Module, learned: nn.Module | None, step: int) -> None:
    """Check after ``step`` steps that only the parameters of `find_trainable` at the start require a gradient.

    Raises:
        ExperimentError: code of the experiment has unfrozen, added or replaced parameters.
    """
    names = [name for name, one in find_trainable(model, learned).items() if known.get(name) is not one]
    if names:
        raise ExperimentError.of(
            "model",
            f"{listed(names)} require a gradient after step {step}, but did not when training started, or have been "
            "replaced. The optimizer only trains parameters that require a gradient at the start. Train in two runs: "
            "freeze the parameters in the first (train.freeze), and start the second from its weights "
            "(train.start_from).",
        )


def hold_statistics(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep BatchNorm with frozen parameters only in evaluation mode, whatever ``train()`` is called around it.

    Called once the model is wrapped: a strategy may have replaced such modules, e.g. by SyncBatchNorm.
    """
    for module in model.modules() if patterns else ():
        own = list(module.parameters(recurse=False)) if isinstance(module, _BatchNorm) else []
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]


def stays_in_evaluation(module: nn.Module) -> bool:
    """Return True if `hold_statistics` keeps a module in evaluation mode."""
    return isinstance(vars(module).get("train"), MethodType)


def count(model: nn.Module) -> int:
    """Return the number of weights that are not trained."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for ``train`` of a module: stay in evaluation mode."""
    del mode
    module.training = False
    return module
