"""Groups of modules that FSDP gathers and reshards together, and checks of models that can't be sharded."""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from pipeline.errors import ExperimentError
from pipeline.strategies._blocks import repeated

_KEY = "parallel.options.groups"

Groups = Mapping[str, nn.Module]
"""Modules by name, outer ones first; all other parameters belong to the group of the model itself."""


def choose(model: nn.Module, wanted: str | tuple[str, ...]) -> Groups:
    """Return the modules that form groups, see `pipeline.strategies.fsdp.Options.groups`.

    Raises:
        ExperimentError: the model has no such class, or its parameters can't be sharded in these groups.
    """
    if wanted == "auto":
        found = repeated(model)
    else:
        classes = () if wanted == "none" else (wanted,) if isinstance(wanted, str) else wanted
        found = {name for kind in classes for name in _of_class(model, kind)}
    groups = {name: module for name, module in model.named_modules() if name in found}
    _check(model, groups)
    return groups


def describe(groups: Groups) -> str:
    """Return the groups as text, e.g. "12 x Block and all other parameters"."""
    counted = Counter(type(module).__name__ for module in groups.values())
    kinds = [f"{count} x {name}" for name, count in counted.items()]
    return f"{', '.join(kinds)} and all other parameters" if kinds else "all parameters in one group"


def _of_class(model: nn.Module, wanted: str) -> set[str]:
    found = {name: module for name, module in model.named_modules() if type(module).__name__ == wanted and name}
    if not found:
        kinds = dict.fromkeys(type(module).__name__ for name, module in model.named_modules() if name)
        raise ExperimentError.of(_KEY, f"the model has no module of class {wanted}; it has {', '.join(kinds)}")
    if any(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in found.values()):
        raise ExperimentError.of(_KEY, f"{wanted} is a container without a forward; name the class of its items")
    return set(found)


def _check(model: nn.Module, groups: Groups) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ExperimentError.of("model", f"{name} is a scalar, which can't be sharded; give it the shape (1,)")
        if not parameter.is_contiguous():
            raise ExperimentError.of(
                "model", f"{name} is not contiguous (channels_last?), which can't be sharded; leave it contiguous"
            )
    places: dict[int, tuple[str, str]] = {}
    types: dict[str, set[str]] = {}
    for group, name, parameter in _owned(model, groups):
        first_group, first_name = places.setdefault(id(parameter), (group, name))
        if first_group != group:
            raise ExperimentError.of(
                _KEY,
                f"{first_name} and {name} are one shared parameter, in {_called(first_group)} and in {_called(group)}. "
                "Set groups: none, or name classes whose modules contain both or neither.",
            )
        if parameter.requires_grad:
            types.setdefault(group, set()).add(str(parameter.dtype))
    for group, dtypes in types.items():
        if len(dtypes) > 1:
            raise ExperimentError.of(
                "model", f"parameters in {_called(group)} are {' and '.join(sorted(dtypes))}; use one type per group"
            )


def _owned(model: nn.Module, groups: Groups) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield each occurrence of each parameter: the innermost group around it, its name, the parameter."""
    known = {id(module): name for name, module in groups.items()}
    places = {
        place: known[id(module)]  # a module may be in several
        for place, module in model.named_modules(remove_duplicate=False)
        if id(module) in known
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        around = [place for place in places if name.startswith(f"{place}.")]
        yield places[max(around, key=len)] if around else "", name, parameter


def _called(group: str) -> str:
    return f"the group {group}" if group else "the group of all other parameters"
