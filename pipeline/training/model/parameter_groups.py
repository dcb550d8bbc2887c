"""Parameter groups of ``optimizer.groups``: each trainable parameter in the first group that matches it.

The group of the optimizer's own arguments comes first, so its learning rate is the one that is reported. Parameters of
a loss or task have names that begin with "task:", and are a last group of their own where no pattern matches them.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from pipeline.config.finetuning import ParameterGroup
from pipeline.errors import ExperimentError, Problem
from pipeline.training.model.learned import PREFIX
from pipeline.training.model.parameter_names import Named, matches, unmatched, with_aliases, without_match
from pipeline.wording import did_you_mean

_KEY = "optimizer.groups"


class Divided(NamedTuple):
    """Trainable parameters of a model and a task by group."""

    own: list[nn.Parameter]
    """Parameters of the model that no group matches."""
    groups: list[list[nn.Parameter]]
    """Parameters of each group, in the order of the file."""
    task: list[nn.Parameter]
    """Parameters of the task that no group matches."""

    def arguments(self, settings: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
        """Return the groups as an optimizer takes them, without empty ones."""
        matched = [
            {"params": parameters, **group.settings} for parameters, group in zip(self.groups, settings, strict=True)
        ]
        around = [{"params": self.own}], [{"params": self.task}]
        return [group for group in (*around[0], *matched, *around[1]) if group["params"]]


def all_named(model: nn.Module, learned: nn.Module | None) -> Named:
    """Return all names of all parameters of a model, and of a task (``learned``), whose names have a prefix."""
    beside = with_aliases(learned) if learned is not None else {}
    return {**with_aliases(model), **{f"{PREFIX}{name}": one for name, one in beside.items()}}


def divide(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    *,
    learned: nn.Module | None = None,
    chosen: Container[int] | None = None,
) -> Divided:
    """Divide the trainable parameters of a model, and of a task (``learned``).

    ``chosen`` has the ids of those that one of several optimizers trains; None: all.

    Raises:
        ExperimentError: a pattern matches no parameter, or a group has none: they are frozen, or in earlier groups.
    """
    named = {name: one for name, one in all_named(model, learned).items() if chosen is None or id(one) in chosen}
    places: dict[int, int] = {}
    for name, parameter in named.items():
        found = next((place for place, group in enumerate(groups) if matches(group.patterns, name)), len(groups))
        places[id(parameter)] = min(found, places.get(id(parameter), found))
    trainable = [one for one in dict.fromkeys(named.values()) if one.requires_grad]
    of_task = {id(one) for one in learned.parameters()} if learned is not None else set[int]()
    rest = [one for one in trainable if places[id(one)] == len(groups)]
    divided = Divided(
        own=[one for one in rest if id(one) not in of_task],
        groups=[[one for one in trainable if places[id(one)] == place] for place in range(len(groups))],
        task=[one for one in rest if id(one) in of_task],
    )
    if problems := _problems(groups, divided, named=named):
        raise ExperimentError(problems)
    return divided


def check_settings(optimizer: Optimizer, groups: Sequence[ParameterGroup], *, has_own: bool) -> None:
    """Check that the groups' settings are in force: torch keeps unknown ones, and a user's function may drop them.

    Args:
        optimizer: the optimizer, built of `Divided.arguments`.
        groups: the groups of the file.
        has_own: True if a group with the optimizer's own arguments comes first.

    Raises:
        ExperimentError: the optimizer has no such setting, or another value of it.
    """
    problems = []
    built = optimizer.param_groups[has_own:]
    for index, group in enumerate(groups):
        for name, value in group.settings.items():
            key = f"{_KEY}[{index}].{name}"
            known = [one for one in optimizer.defaults if one != "params"]
            if name not in known:
                meant = did_you_mean(name, known) or f"; it has {', '.join(known)}"
                problems.append(Problem(key, f"{type(optimizer).__name__} has no setting {name}{meant}"))
            elif index >= len(built) or built[index].get(name) != value:
                message = f"is {value}, but the {type(optimizer).__name__} ignored it; accept parameter groups"
                problems.append(Problem(key, f"{message} in its constructor, as torch's optimizers do"))
    if problems:
        raise ExperimentError(problems)


def _problems(groups: Sequence[ParameterGroup], divided: Divided, *, named: Named) -> list[Problem]:
    problems: list[Problem] = []
    for index, (group, parameters) in enumerate(zip(groups, divided.groups, strict=True)):
        key = f"{_KEY}[{index}].match"
        if missing := without_match(group.patterns, list(named)):
            problems += [Problem(key, unmatched(pattern, list(named))) for pattern in missing]
        elif not parameters:
            of = [one for name, one in named.items() if matches(group.patterns, name)]
            why = "in an earlier group" if any(one.requires_grad for one in of) else "frozen"
            each = "all parameters that it matches are"
            problems.append(Problem(key, f"is {', '.join(group.patterns)}, but {each} {why}; remove the group"))
    return problems
