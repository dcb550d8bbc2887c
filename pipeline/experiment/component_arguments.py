"""Arguments of components: what a class or function takes, and what is wrong with those in the file."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Number
from typing import Any

from pipeline.errors import Problem
from pipeline.experiment import keys
from pipeline.experiment.deferred import RUNTIME_VALUES, marker
from pipeline.experiment.values import Component
from pipeline.wording import did_you_mean

OPTIMIZER = "optimizer"
"""Argument of schedulers, also of those in a SequentialLR. In a ChainedScheduler it is not the first one."""
_WEIGHTS = ("weight", "pos_weight")
"""Arguments of losses that are tensors, for which a file has lists."""
_LIST = re.compile(r"\b(list|List|tuple|Tuple|Sequence|Iterable|Collection)\b")
_NUMBERS = (int, float, "int", "float")
"""Annotations of numbers, as types or as text."""
_CALLED_LATER = {
    "loss": "write a class whose forward(outputs, targets) calls it",
    "task": "write a class whose __call__(model, batch) calls it",
    "metrics": "write a subclass of torchmetrics.Metric",
    "loader": "write a function that returns it",
}
"""Sections whose component returns a function that is called later, and what to write for the function itself."""

Parameters = Mapping[str, inspect.Parameter]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a class or function by name; empty if it has no signature, as some written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def takes_optimizer(function: Callable[..., Any]) -> bool:
    """Return True if a class or function has a parameter for the optimizer."""
    return OPTIMIZER in parameters_of(function)


def check(function: Callable[..., Any], component: Component, *, key: str, passed: Sequence[str]) -> list[Problem]:
    """Find keywords that the callable doesn't take, required ones that are missing, and run-time values without ${}.

    Args:
        function: the class or function.
        component: its arguments in the file.
        key: its key.
        passed: descriptions of the positional arguments that it is also called with.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    given, target = component.arguments, component.target
    problems: list[Problem] = []
    taken: dict[str, str] = {}
    if passed == ("the optimizer",) and takes_optimizer(function):
        parameters.sort(key=lambda parameter: parameter.name != OPTIMIZER)
    for what in () if any(p.kind is p.VAR_POSITIONAL for p in parameters) else passed:
        if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            message = f"{target} cannot be called with {', '.join(passed)}. Name another callable."
            return [Problem(f"{key}._target_", message)]
        taken[parameters.pop(0).name] = what
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # A wrapper may take more than its function takes, as the wrapper of transformers' configurations does.
    outer = inspect.signature(function, follow_wrapped=False).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in (*parameters, *outer))
    for name, value in given.items():
        if name in taken:
            message = f"pipeline passes {taken[name]} to {target} as this argument. Remove it."
            problems.append(Problem(keys.child(key, name), message))
        elif name not in named and not takes_any:
            problems.append(Problem(keys.child(key, name), describe_unknown(name, list(named), target)))
        elif value in RUNTIME_VALUES and name in named and named[name].annotation in _NUMBERS:
            problems.append(Problem(keys.child(key, name), f'is {value!r} (a string). Write "{marker(value)}".'))
    missing = [name for name, one in named.items() if one.default is one.empty and name not in given]
    is_itself = not inspect.isclass(function) and (len(missing) > 1 or not given)
    return [*problems, *_missing(missing, target=target, key=key, is_itself=is_itself)]


def describe_unknown(name: str, known: list[str], target: str) -> str:
    """Return the message about an argument that a class or function doesn't take."""
    takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return f"{target} has no such argument{did_you_mean(name, known) or f'; {takes}'}"


def with_tensors(arguments: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Return the arguments with a tensor for each list of weights that a loss takes as a tensor."""
    lists = {name: arguments[name] for name in _WEIGHTS if isinstance(arguments.get(name), list)}
    lists = {name: one for name, one in lists.items() if _is_tensor(parameters.get(name))}
    if not lists:
        return dict(arguments)
    import torch  # not in processes that build no component

    with suppress(TypeError, ValueError):  # not numbers, or lists of several lengths: torch refuses the list
        return {**arguments, **{name: torch.tensor(one, dtype=torch.float32) for name, one in lists.items()}}
    return dict(arguments)


def find_wrong_type(error: Exception, arguments: Mapping[str, Any], parameters: Parameters) -> tuple[str, str] | None:
    """Find an argument that an error is probably about: no number although its default is one, or no tensor.

    An error about a number names the other type, e.g. 'str'; an argument such as ``size=[32, 48]`` may be correct.
    Returns its name, and what to write. A file can't hold a tensor, but `with_tensors` makes one.
    """
    for name, value in arguments.items():
        parameter = parameters.get(name)
        is_named = not isinstance(value, Number) and f"'{type(value).__name__}'" in str(error)
        if parameter is not None and isinstance(parameter.default, Number) and is_named:
            return name, "Write a number."
        if name in _WEIGHTS and _is_tensor(parameter) and isinstance(value, str | Number | list):
            return name, "Write a list of numbers."
    return None


def _is_tensor(parameter: inspect.Parameter | None) -> bool:
    """Return True if the type of a parameter is a tensor, perhaps among others, but no list."""
    kind = str(parameter.annotation) if parameter is not None else ""
    return "Tensor" in kind and not _LIST.search(kind)


def _missing(names: Sequence[str], *, target: str, key: str, is_itself: bool) -> list[Problem]:
    """Return the problems of missing arguments; ``is_itself``: they may be those of a call in each step."""
    remedy = _CALLED_LATER.get(key.partition(".")[0]) if is_itself else None
    if not names or remedy is None:
        return [Problem(keys.child(key, name), f"missing. {target} requires this argument.") for name in names]
    message = f"{target} is called once, with the arguments in this section, but also requires {', '.join(names)}"
    return [Problem(f"{key}._target_", f"{message}. If {target} is to be called in each step, {remedy}.")]
