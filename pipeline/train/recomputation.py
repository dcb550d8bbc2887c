"""Activation checkpointing: modules that discard their activations, and recompute them in the backward pass.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. A module keeps its name, its place
and the name of its class, so that checkpoints, strategies and loops over modules see the same model with and without.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ExperimentError
from pipeline.experiment.train import Patterns
from pipeline.strategies._blocks import find_repeated_blocks
from pipeline.wording import did_you_mean, listed

_KEY = "train.activation_checkpointing"


def apply(model: nn.Module, wanted: Patterns, *, is_compiled: bool) -> None:
    """Make the modules of a model that match ``activation_checkpointing`` recompute their activations, in place."""
    for name in choose(model, wanted):
        module = model.get_submodule(name)
        if is_compiled and any(isinstance(inner, _BatchNorm) for inner in module.modules()):
            message = f"{name} has batch statistics, which a compiled model updates twice; remove train.compile"
            raise ExperimentError.of(_KEY, message)
        module.__class__ = _recomputing(type(module), is_compiled=is_compiled)  # type: ignore[arg-type]


def choose(model: nn.Module, wanted: Patterns) -> tuple[str, ...]:
    """Return the names of the outermost modules that match."""
    modules = {name: module for name, module in model.named_modules() if name}
    found = find_repeated_blocks(model) if wanted is True else set()
    for pattern in (wanted,) if isinstance(wanted, str) else () if isinstance(wanted, bool) else wanted:
        parts = [(name, name.split("."), pattern.split(".")) for name in modules]
        own = {name for name, have, want in parts if len(have) == len(want) and all(map(fnmatchcase, have, want))}
        if not own:
            hint = did_you_mean(pattern, modules) or f"; it has {listed(list(modules))}"
            raise ExperimentError.of(_KEY, f"the model has no module {pattern}{hint}")
        found |= own
    if wanted is True and not found:
        message = f"the model has no repeated blocks; name modules instead of true: {listed(list(modules))}"
        raise ExperimentError.of(_KEY, message)
    for name in found:
        if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
            raise ExperimentError.of(_KEY, f"{name} is a container without a forward; set {name}.*")
    return tuple(name for name in modules if name in found and not any(name.startswith(f"{one}.") for one in found))


@cache
def _recomputing(kind: type[nn.Module], *, is_compiled: bool) -> type[nn.Module]:
    """Derive a class whose forward pass keeps only its inputs."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if is_compiled:  # torch.compile doesn't support the contexts, and updates buffers only once
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _again(self)), **kwargs)

    body = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), body)


@contextmanager
def _again(module: nn.Module) -> Iterator[None]:
    """Prevent the recomputation in the block from updating batch statistics again; refuse other buffers it changes."""
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    counted = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    before = {id(buffer): buffer._version for buffer in module.buffers() if id(buffer) not in counted}
    for norm, (_, count) in zip(norms, kept, strict=True):
        norm.momentum = 0.0  # keeps the statistics; turning them off would change which tensors are saved
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
        for name, buffer in module.named_buffers():
            if buffer._version != before.get(id(buffer), buffer._version):
                message = f"recomputing {type(module).__name__} would update its buffer {name} twice"
                raise ExperimentError.of(_KEY, f"{message}; name modules that don't update buffers")
