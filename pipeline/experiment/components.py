"""Components: ``_target_`` with its arguments, checked before anything starts and built where training runs."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.errors import ExperimentError, PipelineError, Problem
from pipeline.experiment import keys, references, targets
from pipeline.experiment.problems import hint_at_quotes, shown
from pipeline.experiment.references import RUNTIME_VALUES, marker
from pipeline.experiment.schema import DEFAULT_COLLATE, Experiment
from pipeline.experiment.train import Optimizer
from pipeline.experiment.values import Component
from pipeline.wording import did_you_mean

_OPTIMIZER = "optimizer"
"""Argument of schedulers, also of those in a SequentialLR. In a ChainedScheduler it is not the first one."""
_PASSED = {
    "optimizer": ("the model's parameters",),
    "optimizers": ("the model's parameters",),
    "scheduler": ("the optimizer",),
    "schedulers": ("the optimizer",),
    "tracking.loggers": ("the run's folder",),
    "sampler": ("the training set", "the epoch", "a generator"),
    DEFAULT_COLLATE: ("the samples",),
}
"""Positional arguments that components are called with, by their key or target."""
_CALLED_LATER = {
    "loss": "name a class such as torch.nn.CrossEntropyLoss, or write one whose forward(outputs, targets) calls it",
    "task": "write a class whose __call__(model, batch) calls it",
    "metrics": "write a subclass of torchmetrics.Metric",
    "loader": "write a function that returns it",
}
"""Sections whose component returns a function that is called later, and what to write for the function itself."""
_WEIGHTS = ("weight", "pos_weight")
"""Arguments of losses that are tensors, for which a file has lists."""
Parameters = Mapping[str, inspect.Parameter]

_LISTS = r"list|List|tuple|Tuple|Sequence|Iterable|Collection"
_LIST = re.compile(rf"\b({_LISTS})\b")
_NUMERIC = re.compile(r"\b(int|float|bool)\b")
_OTHER = re.compile(rf"\b({_LISTS}|dict|Dict|Mapping|set|Callable|str|Any|object|Literal|Path|PathLike|Enum)\b")
"""Types in an annotation that a text, or something made of texts, may be."""


class Checked(NamedTuple):
    """What is wrong with the components of an experiment, also nested ones, before any is called."""

    problems: list[Problem]
    rejected: list[Problem]
    """The problems that are components which are not allowed or not found."""


class _Found(NamedTuple):
    """A component with its key, and the class or function that it names."""

    key: str
    component: Component
    function: Callable[..., Any]


def resolve(component: Component, *, key: str, allowed: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class or function that a component names.

    Raises:
        ExperimentError: it is not allowed, also with its arguments; not found, or its package can't be imported.
    """
    return targets.find(component.target, key=key, allowed=allowed)


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a class or function by name; empty if it has no signature, as some written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def named(experiment: Experiment) -> Iterator[tuple[str, Component]]:
    """Yield the components of an experiment with their keys, except nested ones."""
    loader, train = experiment.loader, experiment.train
    single = ("model", "data", "sampler", "loss", "task", "optimizer", "scheduler")
    found = {name: getattr(experiment, name) for name in single}
    for section in ("optimizers", "schedulers", "metrics"):
        found |= {keys.child(section, name): one for name, one in getattr(experiment, section).items()}
    found |= {"loader.collate": loader.collate, "loader.evaluation_collate": loader.evaluation_collate}
    found["train.batch_transform"] = train.batch_transform
    found |= {keys.child("hooks", number): one for number, one in enumerate(experiment.hooks)}
    found |= experiment.tracking.custom_loggers
    yield from ((key, one) for key, one in found.items() if one is not None)


# Checking


def check(experiment: Experiment, *, allowed: tuple[str, ...]) -> Checked:
    """Find what is wrong with the components without calling them; imports their packages."""
    problems, rejected = list[Problem](), list[Problem]()
    experiment = references.fill_in(experiment)
    functions: dict[str, Callable[..., Any]] = {}
    for key, component in named(experiment):
        keys_of = (key.partition("[")[0], key.partition(".")[0], component.target)
        passed = next((_PASSED[one] for one in keys_of if one in _PASSED), ())
        for found in _iter_found(component, key=key, allowed=allowed):
            if isinstance(found, Problem):
                if found.message not in {one.message for one in rejected}:  # a module that fails is named once
                    rejected.append(found)
                continue
            functions[found.key] = found.function
            is_nested = found.key != key and not (
                passed == _PASSED["scheduler"] and _OPTIMIZER in parameters_of(found.function)
            )
            problems += _check_arguments(found, passed=() if is_nested else passed)
            if needed := targets.find_missing_package(found.function):
                problems.append(Problem(f"{found.key}._target_", needed))
        problems += _find_unset(component, key=key)
    problems += rejected
    wrong = {problem.key.partition(".")[0] for problem in problems}
    if experiment.task is not None and not experiment.optimizers and "task" not in wrong:
        problems += _check_task(experiment.task, functions["task"])
    for key, component in named(experiment):
        if isinstance(component, Optimizer) and wrong.isdisjoint(("optimizer", "optimizers")):
            problems += _check_groups(component, functions[key], key=key)
    return Checked(problems, rejected)


def _iter_found(component: Component, *, key: str, allowed: tuple[str, ...]) -> Iterator[_Found | Problem]:
    """Yield a component and those nested in it, or what is wrong with their names."""
    try:
        yield _Found(key, component, resolve(component, key=key, allowed=allowed))
    except ExperimentError as error:
        yield from error.problems
    inside: list[tuple[str, Any]] = [(key, component.arguments)]
    for where, value in inside:
        items = (
            value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for name, inner in items:
            there = keys.child(where, name)
            if not _is_component(inner):
                inside.append((there, inner))
                continue
            try:
                nested = _component(inner, there)
            except ExperimentError as error:
                yield from error.problems
            else:
                yield from _iter_found(nested, key=there, allowed=allowed)


def _check_arguments(found: _Found, *, passed: Sequence[str]) -> list[Problem]:
    """Find keywords that the callable doesn't take, required ones that are missing, and texts in place of numbers."""
    key, (target, given), problems = found.key, (found.component.target, found.component.arguments), list[Problem]()
    try:
        parameters = list(inspect.signature(found.function).parameters.values())
    except (TypeError, ValueError):
        return []
    taken: dict[str, str] = {}
    if passed == _PASSED["scheduler"] and _OPTIMIZER in parameters_of(found.function):
        parameters.sort(key=lambda parameter: parameter.name != _OPTIMIZER)
    for what in () if any(p.kind is p.VAR_POSITIONAL for p in parameters) else passed:
        if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            message = f"{target} cannot be called with {', '.join(passed)}. Name another callable."
            return [Problem(f"{key}._target_", message)]
        taken[parameters.pop(0).name] = what
    names = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # A wrapper may take more than its function takes, as the wrapper of transformers' configurations does.
    outer = inspect.signature(found.function, follow_wrapped=False).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in (*parameters, *outer))
    for name, value in given.items():
        message = ""
        if name in taken:
            message = f"pipeline passes {taken[name]} to {target} as this argument. Remove it."
        elif name not in names:
            message = "" if takes_any else _unknown_argument(name, list(names), target)
        elif isinstance(value, str) and "${" not in value and (noun := _numeric_noun(names[name])):
            write = f'"{marker(value)}"' if value in RUNTIME_VALUES else f"{noun}{hint_at_quotes(value)}"
            message = references.redact(f"is {shown(value)}. Write {write}.")
        if message:
            problems.append(Problem(keys.child(key, name), message))
    missing = [name for name, one in names.items() if one.default is one.empty and name not in given]
    is_itself = not inspect.isclass(found.function) and (len(missing) > 1 or not given)
    remedy = _CALLED_LATER.get(key.partition(".")[0]) if is_itself else None
    if missing and remedy:  # they may be those of a call in each step
        message = f"{target} is called once, with the arguments in this section, but also requires {', '.join(missing)}"
        message = f"{message}. If {target} is to be called in each step, {remedy}."
        return [*problems, Problem(f"{key}._target_", message)]
    return [
        *problems,
        *(Problem(keys.child(key, name), f"missing. {target} requires this argument.") for name in missing),
    ]


def _numeric_noun(parameter: inspect.Parameter) -> str:
    """Return what the annotation of a parameter asks for if that is a number or a boolean alone; else an empty text."""
    kind = parameter.annotation
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", "") if inspect.isclass(kind) else str(kind)
    if not (found := _NUMERIC.findall(text)) or _OTHER.search(text):
        return ""
    return "true or false" if {*found} == {"bool"} else "a number"


def _unknown_argument(name: str, known: list[str], target: str) -> str:
    takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return f"{target} has no such argument{did_you_mean(name, known) or f'; {takes}'}"


def _find_unset(component: Component, *, key: str) -> Iterator[Problem]:
    """Find variables that are not set here. Secrets may be set on the workers' nodes alone; loggers are built here."""
    for parts, text in keys.walk(component.arguments):
        for name in references.variables_in(text) if isinstance(text, str) else ():
            if key.startswith("tracking.") or not references.is_secret(name):
                yield Problem(f"{key}.{keys.join(parts)}", f"is {text!r}; {references.explain_unset(name)}")


def _check_task(task: Component, kind: Callable[..., Any]) -> Iterator[Problem]:
    """Find a task that updates several optimizers in an experiment with one optimizer."""
    if not inspect.isclass(kind):
        return
    call = getattr(kind, "forward", kind.__call__)  # a module's, or another class's
    parameters = list(inspect.signature(call).parameters.values())[1:]
    given = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(given) > 2:
        message = f"{task.target} updates several optimizers (its third argument is {given[2].name})"
        yield Problem("task", f"{message}. Replace optimizer by optimizers, with one section per optimizer.")


def _check_groups(optimizer: Optimizer, kind: Callable[..., Any], *, key: str) -> Iterator[Problem]:
    """Find settings of parameter groups that a class of optimizers doesn't take; torch would keep them unused."""
    parameters = list(parameters_of(kind).values())
    if not inspect.isclass(kind) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters][1:]
    for index, group in enumerate(optimizer.groups):
        for name in group.settings:
            if name not in known:
                yield Problem(f"{key}.groups[{index}].{name}", _unknown_argument(name, known, optimizer.target))


# Building


def build(component: Component, *args: object, key: str, allowed: tuple[str, ...]) -> Any:
    """Call a component, whose references `references.fill_in` has replaced, with ``args`` and its own arguments.

    Nested components are built first.

    Raises:
        ExperimentError: it can't be found or imported, or raises an exception, which is the cause.
    """
    return bind(component, key=key, allowed=allowed, scheduled=args if key == "scheduler" else ())(*args)


def bind(
    component: Component, *, key: str, allowed: tuple[str, ...], scheduled: tuple[object, ...] = ()
) -> Callable[..., Any]:
    """Return the function that a component names, its own arguments filled in; nested components are built once.

    ``scheduled`` is the optimizer, if nested components may be schedulers. The function raises ExperimentError in place
    of an exception, which is the cause.

    Raises:
        ExperimentError: it can't be found or imported, or a nested component can't be built.
    """
    function = resolve(component, key=key, allowed=allowed)
    parameters = parameters_of(function)
    arguments = _build_inside(component.arguments, key=key, allowed=allowed, scheduled=scheduled)
    arguments = _with_tensors(arguments, parameters)
    by_name = bool(scheduled) and _OPTIMIZER in parameters
    return partial(_call, function, component, key, arguments, by_name)


def _call(
    function: Callable[..., Any],
    component: Component,
    key: str,
    arguments: Mapping[str, Any],
    by_name: bool,
    *args: Any,
) -> Any:
    try:
        return function(**{_OPTIMIZER: args[0]}, **arguments) if by_name else function(*args, **arguments)
    except PipelineError:
        raise
    except Exception as error:  # whatever a constructor raises, its arguments in the file led to it
        said = references.redact(" ".join(str(error).split()))[:300]
        place = targets.own_place(error, component.target.partition(".")[0])
        message = f"{component.target} raised {type(error).__name__}: {said}{place}"
        if isinstance(error, TypeError | ValueError):
            parameters = parameters_of(function)
            for name, value in arguments.items():
                if remedy := _find_wrong_type(error, name, value, parameters.get(name)):
                    message = f"is {references.redact(shown(component.arguments[name]))}. {remedy} {message}"
                    raise ExperimentError.of(keys.child(key, name), message) from error
        raise ExperimentError.of(key, message) from error


def _build_inside(value: Any, *, key: str, allowed: tuple[str, ...], scheduled: tuple[object, ...]) -> Any:
    """Build the components inside a value."""
    if isinstance(value, str) and (unknown := references.explain_unknown(value)):
        raise ExperimentError.of(key, unknown)
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    built: dict[Any, Any] = {}
    for name, inner in items:
        where = keys.child(key, name)
        if not _is_component(inner):
            built[name] = _build_inside(inner, key=where, allowed=allowed, scheduled=scheduled)
            continue
        component = _component(inner, where)
        create = bind(component, key=where, allowed=allowed, scheduled=scheduled)
        takes_it = scheduled and _OPTIMIZER in parameters_of(resolve(component, key=where, allowed=allowed))
        built[name] = create(*scheduled) if takes_it else create()
    return built if isinstance(value, Mapping) else list(built.values()) if isinstance(value, list | tuple) else value


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _component(mapping: Mapping[str, Any], key: str) -> Component:
    try:
        return Component.model_validate(dict(mapping), by_alias=True, by_name=False)
    except ValidationError:
        message = f"is {mapping['_target_']!r}; write _target_: package.name"
        raise ExperimentError.of(f"{key}._target_", message) from None


def _with_tensors(arguments: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """Return the arguments with a tensor for each list of weights that a loss takes as a tensor."""
    found = dict(arguments)
    for name in _WEIGHTS:
        if isinstance(found.get(name), list) and _is_tensor(parameters.get(name)):
            import torch  # not in processes that build no component

            with suppress(TypeError, ValueError):  # not numbers, or lists of several lengths: torch refuses the list
                found[name] = torch.tensor(found[name], dtype=torch.float32)
    return found


def _find_wrong_type(error: Exception, name: str, value: object, parameter: inspect.Parameter | None) -> str:
    """Return what to write for an argument that an error, which names its type, is probably about; empty for others."""
    is_named = not isinstance(value, Number) and f"'{type(value).__name__}'" in str(error)
    if parameter is not None and isinstance(parameter.default, Number) and is_named:
        return "Write a number."
    is_wrong = name in _WEIGHTS and _is_tensor(parameter) and isinstance(value, str | Number | list)
    return "Write a list of numbers." if is_wrong else ""


def _is_tensor(parameter: inspect.Parameter | None) -> bool:
    """Return True if the type of a parameter is a tensor, perhaps among others, but no list."""
    kind = str(parameter.annotation) if parameter is not None else ""
    return "Tensor" in kind and not _LIST.search(kind)
