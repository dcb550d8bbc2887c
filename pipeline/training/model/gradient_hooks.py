"""Hooks that user code registers on gradients. They see the gradients of a micro-batch, not of the global batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeline.training.model.parameter_names import listed

_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")


def find_hooked(module: nn.Module) -> list[str]:
    """List the names of the parameters and modules that have hooks on gradients. Call before a strategy wraps them."""
    return list(dict.fromkeys(name for name, _ in _hooks(module)))


def format_warning(names: Sequence[str], *, micro_batches: int) -> str:
    """Format the warning about hooks in a step of several micro-batches; empty without hooks."""
    if not names or micro_batches == 1:
        return ""
    return (
        f"model: gradients of {listed(names)} have hooks. A hook gets the gradient of one of the step's "
        f"{micro_batches} micro-batches, not of the global batch. If it is not linear, such as clamp, training depends "
        "on the number of workers and micro-batches. Use train.clip_grad_norm, or an optimizer that changes gradients."
    )


@contextmanager
def silenced(module: nn.Module) -> Iterator[None]:
    """Remove all hooks on gradients inside the block."""
    found = [(hooks, dict(hooks)) for _, hooks in _hooks(module)]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the names and the hooks of parameters and modules that have any."""
    named: list[tuple[str, object, tuple[str, ...]]] = [
        *((name, one, _OF_TENSORS) for name, one in module.named_parameters()),
        *((name or "the model", one, _OF_MODULES) for name, one in module.named_modules()),
    ]
    for name, one, attributes in named:
        for attribute in attributes:
            if hooks := getattr(one, attribute, None):
                yield name, hooks
