"""Groups of modules that FSDP gathers and reshards together; recomputation uses the repeated blocks among them."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from pipeline.errors import ExperimentError

_KEY = "parallel.options.groups"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Groups = Mapping[str, nn.Module]
"""Modules by name, outer ones first; all other parameters belong to one more group."""


def find_repeated_blocks(model: nn.Module) -> set[str]:
    """Return the names of the modules whose class, repeated in lists or sequences, holds the most parameters."""
    kinds: dict[tuple[str, str], dict[str, nn.Module]] = {}
    for place, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for name, child in container.named_children():
            if not isinstance(child, _CONTAINERS) and _count_parameters(child):
                kind = type(child).__module__, type(child).__qualname__  # sharding replaces some classes by namesakes
                kinds.setdefault(kind, {})[f"{place}.{name}" if place else name] = child
    several = [modules for modules in kinds.values() if len(modules) > 1]
    largest: dict[str, nn.Module] = max(
        several, key=lambda modules: sum(map(_count_parameters, modules.values())), default={}
    )
    return set(largest)


def choose(model: nn.Module, wanted: str | tuple[str, ...]) -> Groups:
    """Return the modules that form groups, see `pipeline.strategies.fsdp.Options.groups`; refuse what can't be one."""
    classes = () if wanted in ("auto", "none") else (wanted,) if isinstance(wanted, str) else wanted
    found = find_repeated_blocks(model) if wanted == "auto" else set()
    for kind in classes:
        own = {name: module for name, module in model.named_modules() if type(module).__name__ == kind and name}
        if not own:
            kinds = dict.fromkeys(type(module).__name__ for name, module in model.named_modules() if name)
            raise ExperimentError.of(_KEY, f"the model has no module of class {kind}; it has {', '.join(kinds)}")
        if any(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in own.values()):
            raise ExperimentError.of(_KEY, f"{kind} is a container without a forward; name the class of its items")
        found.update(own)
    groups = {name: module for name, module in model.named_modules() if name in found}
    known = {id(one): name for name, one in groups.items()}
    places = {  # a module may be in several
        place: known[id(one)] for place, one in model.named_modules(remove_duplicate=False) if id(one) in known
    }
    first_places: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [place for place in places if name.startswith(f"{place}.")]
        group = places[max(around, key=len)] if around else ""
        first_group, first_name = first_places.setdefault(id(parameter), (group, name))
        if first_group != group:
            raise ExperimentError.of(
                _KEY,
                f"{first_name} and {name} are one shared parameter, in {_called(first_group)} and in {_called(group)}. "
                "Set groups: none, or name classes whose modules contain both or neither.",
            )
    return groups


def describe(groups: Groups) -> str:
    """Return the groups as text, e.g. "12 x Block and all other parameters"."""
    counted = Counter(type(module).__name__ for module in groups.values())
    kinds = [f"{count} x {name}" for name, count in counted.items()]
    return f"{', '.join(kinds)} and all other parameters" if kinds else "all parameters in one group"


def _called(group: str) -> str:
    return f"the group {group}" if group else "the group of all other parameters"


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
