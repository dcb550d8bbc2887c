"""Keys of fine-tuning: the weights to start from, and the parameter groups of the optimizer."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from pipeline.experiment import keys
from pipeline.experiment.values import Component, FilePath, Section

OWN_RATES: Mapping[str, tuple[str, ...]] = {
    "torch.optim.lr_scheduler.OneCycleLR": ("max_lr",),
    "torch.optim.lr_scheduler.CyclicLR": ("base_lr", "max_lr"),
}
"""Schedulers that replace the optimizer's learning rate, and the arguments with their rates."""
Pattern = Annotated[str, Field(min_length=1)]


class StartFrom(Section):
    """Initial weights of the model, from the result of a run or from a safetensors file."""

    run: FilePath | None = None
    """Run to load the weights from: a unique part of its id, or its folder. Loads the best weights if the run sets
    ``checkpoint.best``, otherwise the last weights."""
    file: FilePath | None = None
    """Path of a safetensors file, relative to the working directory, instead of ``run``."""
    strict: bool = True
    """Require weights with exactly the names and shapes of the model. false: parameters that are missing or have
    another shape keep their initial values, and weights that the model does not have are ignored. Both are reported."""
    rename: Mapping[str, str] = {}
    """Mapping of old to new name prefixes, up to a dot. ``backbone: encoder`` renames backbone.0.weight to
    encoder.0.weight, ``"": encoder`` adds a prefix, and ``module: ""`` removes a prefix. The longest match counts."""


class ParameterGroup(Section):
    """Parameters with separate settings: ``match``, and any argument of the optimizer, such as lr."""

    model_config = ConfigDict(extra="allow")

    match: Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Name or names of parameters. An asterisk matches any characters, including dots. A parameter belongs to the first
    group that matches it. Parameters that no group matches use the optimizer's arguments."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns as a tuple."""
        return (self.match,) if isinstance(self.match, str) else self.match

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings as written in the file, such as lr."""
        return self.model_extra or {}

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{', '.join(self.patterns)} with {settings}"


class Optimizer(Component):
    """Optimizer: ``_target_: package.name`` with keyword arguments, and groups of parameters with other arguments."""

    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with other arguments, such as ``{match: "*.bias", weight_decay: 0}``."""


def misused(
    start_from: StartFrom | None, optimizer: Optimizer | None, scheduler: Component | None
) -> Iterator[tuple[str, str]]:
    """Find contradictions between these keys; yield each key with a message."""
    if start_from is not None and (start_from.run is None) == (start_from.file is None):
        given = "has neither run nor file. Set" if start_from.run is None else "has both run and file. Keep"
        yield "train.start_from", f"{given} one of them."
    for index, group in enumerate(optimizer.groups if optimizer is not None else ()):
        key = f"optimizer.groups[{index}]"
        if not group.settings:
            yield key, "has no setting besides match. Add one, e.g. weight_decay: 0"
        for name, value in group.settings.items():
            if isinstance(value, Mapping) or "${" in str(value):
                yield keys.child(key, name), f"is {value}; write a number, true or false, or a list of them"
    if optimizer is not None:
        yield from _replaced_rates(optimizer, scheduler)


def _replaced_rates(optimizer: Optimizer, scheduler: Component | None) -> Iterator[tuple[str, str]]:
    """Find learning rates of groups that a scheduler with one rate of its own replaces."""
    rates = OWN_RATES.get(scheduler.target, ()) if scheduler is not None else ()
    for name in rates:
        if scheduler is None or isinstance(scheduler.arguments.get(name), list | tuple):
            continue
        for index, group in enumerate(optimizer.groups):
            if "lr" in group.settings:
                message = f"has no effect, because scheduler.{name} replaces it. Set a list there, one rate per group."
                yield f"optimizer.groups[{index}].lr", message
