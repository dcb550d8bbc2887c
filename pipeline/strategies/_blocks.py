"""Repeated blocks of a model, such as a transformer's layers; shared by FSDP's groups and recomputation."""

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated(model: nn.Module) -> set[str]:
    """Return the names of the modules whose class, repeated in lists or sequences, holds the most parameters."""
    kinds: dict[tuple[str, str], dict[str, nn.Module]] = {}
    for place, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for name, child in container.named_children():
            if not isinstance(child, _CONTAINERS) and _size(child):
                kinds.setdefault(_kind(child), {})[f"{place}.{name}" if place else name] = child
    several = [modules for modules in kinds.values() if len(modules) > 1]
    largest: dict[str, nn.Module] = max(several, key=lambda modules: sum(map(_size, modules.values())), default={})
    return set(largest)


def _kind(module: nn.Module) -> tuple[str, str]:
    """Return module and name of the class: sharding replaces the class of some instances by one of the same name."""
    return type(module).__module__, type(module).__qualname__


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
