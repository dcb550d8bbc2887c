"""Names of parameters as users see and write them, and patterns over them.

Inside, all are those of `Trainee`: "model.layer.weight", "task.factor". A user's names have no "model." before them.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from pipeline.wording import did_you_mean, listed

TASK = "task."  # Beginning of the names of a task's parameters and buffers

Named = dict[str, nn.Parameter]  # Parameters by the name that a user writes


def shown(name: str) -> str:
    """Return the name that a user knows of what has a name in `Trainee`."""
    return name.removeprefix("model.")


def named(trainee: nn.Module) -> Named:
    """Return all names of all parameters: those that are tied, such as of embedding and output, have several."""
    return {shown(name): one for name, one in trainee.named_parameters(remove_duplicate=False)}


def find_trainable(trainee: nn.Module) -> Named:
    """Return the parameters that require a gradient, each once, in the order in which DDP counts them."""
    return {shown(name): one for name, one in trainee.named_parameters() if one.requires_grad}


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return True if a name matches any of the patterns; ``*`` matches dots, too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def without_match(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that match none of the names."""
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def describe_unmatched(pattern: str, names: Sequence[str]) -> str:
    """Return the message on a pattern that matches none of the names, with the pattern that was probably meant."""
    inside = any(name.startswith(f"{pattern}.") for name in names)
    dots = ((name, place) for name in names for place, character in enumerate(name) if character == ".")
    beginnings = dict.fromkeys(name[: place + 1] + "*" for name, place in dots)
    meant = f"; did you mean {pattern}.*?" if inside else did_you_mean(pattern, [*names, *beginnings], cutoff=0.7)
    return f"{pattern} matches no parameter of the model{meant}; there are {listed(names)}"
