"""Components: ``_target_`` with its arguments, checked before anything starts and built where training runs."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.errors import ExperimentError, PipelineError, Problem
from pipeline.experiment import keys, references, targets
from pipeline.experiment.problems import describe_value, hint_at_quotes
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
_WEIGHTS = ("weight", "pos_weight")  # Arguments of losses that are tensors, for which a file has lists
_LIST = re.compile(r"\b(list|List|tuple|Tuple|Sequence|Iterable|Collection)\b")
_NUMERIC = re.compile(r"\b(int|float|bool)\b")
_OTHER = re.compile(r"\b(dict|Dict|Mapping|set|Callable|str|Any|object|Literal|Path|PathLike|Enum)\b")
"""Types in an annotation that a text, or something made of texts, may be."""
Parameters = Mapping[str, inspect.Parameter]


class Checked(NamedTuple):
    """Problems of the components of an experiment, also of nested ones, before any is called."""

    problems: list[Problem]
    rejected: list[Problem]  # The problems that are components which are not allowed or not found


class _Found(NamedTuple):
    """A component with its key, and the class or function that it names."""

    key: str
    component: Component
    function: Callable[..., Any]


def resolve(component: Component, *, key: str, allowed: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class or function that a component names."""
    return targets.find(component.target, key=key, allowed=allowed)


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a class or function by name; empty if it has no signature, as some written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def iter_components(experiment: Experiment) -> Iterator[tuple[str, Component]]:
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
    """Find problems of the components without calling them; imports their packages."""
    problems, rejected = list[Problem](), list[Problem]()
    # On a cluster, secrets may be set on the nodes alone. Loggers are built here.
    has_nodes = experiment.parallel.launcher == "ray" and experiment.parallel.cluster is not None
    experiment = references.fill_in(experiment)
    for key, component in iter_components(experiment):
        keys_of = (key.partition("[")[0], key.partition(".")[0], component.target)
        passed = next((_PASSED[one] for one in keys_of if one in _PASSED), ())
        for found in _iter_found(component, key=key, allowed=allowed):
            if isinstance(found, Problem):
                if found.message not in {one.message for one in rejected}:  # a module that fails is named once
                    rejected.append(found)
                continue
            takes_optimizer = passed == _PASSED["scheduler"] and _OPTIMIZER in parameters_of(found.function)
            problems += _check_arguments(found, passed if found.key == key or takes_optimizer else ())
            if needed := targets.find_missing_package(found.function):
                problems.append(Problem(f"{found.key}._target_", needed))
            if found.key == key and isinstance(component, Optimizer):
                problems += _check_groups(component, found.function, key=key)
        for parts, text in keys.walk(component.arguments):
            for name in references.find_unset_variables(text) if isinstance(text, str) else ():
                if key.startswith("tracking.") or not (has_nodes and references.is_secret(name)):
                    message = f"is {text!r}; {references.explain_unset(name)}"
                    problems.append(Problem(f"{key}.{keys.join(parts)}", message))
    return Checked([*problems, *rejected], rejected)


def _iter_found(component: Component, *, key: str, allowed: tuple[str, ...]) -> Iterator[_Found | Problem]:
    """Yield a component and those nested in it, or what is wrong with their names."""
    try:
        yield _Found(key, component, resolve(component, key=key, allowed=allowed))
    except ExperimentError as error:
        yield from error.problems
    inside: list[tuple[str, Any]] = [(key, component.arguments)]
    for where, value in inside:
        for name, inner in _iter_items(value):
            there = keys.child(where, name)
            if not _is_component(inner):
                inside.append((there, inner))
                continue
            try:
                nested = _make_component(inner, there)
            except ExperimentError as error:
                yield from error.problems
            else:
                yield from _iter_found(nested, key=there, allowed=allowed)


def _check_arguments(found: _Found, passed: Sequence[str]) -> Iterator[Problem]:
    """Find unknown keywords, required ones that are missing, and texts that should be numbers."""
    key, target, given = found.key, found.component.target, found.component.arguments
    try:
        parameters = list(inspect.signature(found.function).parameters.values())
    except (TypeError, ValueError):  # as some that are written in C
        return
    if passed == _PASSED["scheduler"]:
        parameters.sort(key=lambda parameter: parameter.name != _OPTIMIZER)
    taken: dict[str, str] = {}
    for what in () if any(p.kind is p.VAR_POSITIONAL for p in parameters) else passed:
        if parameters and parameters[0].kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            taken[parameters.pop(0).name] = what
    names = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # A wrapper may take more than its function takes, as the wrapper of transformers' configurations does.
    outer = inspect.signature(found.function, follow_wrapped=False).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in (*parameters, *outer))
    for name, value in given.items():
        there = keys.child(key, name)
        if name in taken:
            yield Problem(there, f"pipeline passes {taken[name]} to {target} as this argument. Remove it.")
        elif name in names:
            yield from _check_number(there, value, names[name])
        elif not takes_any:
            yield Problem(there, _explain_unknown(name, list(names), target))
    missing = [name for name, one in names.items() if one.default is one.empty and name not in given]
    is_itself = not inspect.isclass(found.function) and (len(missing) > 1 or not given)
    remedy = _CALLED_LATER.get(key.partition(".")[0]) if is_itself else None
    if missing and remedy:  # they may be those of a call in each step
        message = f"{target} is called once, with the arguments in this section, but also requires {', '.join(missing)}"
        yield Problem(f"{key}._target_", f"{message}. If {target} is to be called in each step, {remedy}.")
        return
    for name in missing:
        yield Problem(keys.child(key, name), f"missing. {target} requires this argument.")


def _check_number(key: str, value: object, parameter: inspect.Parameter) -> Iterator[Problem]:
    """Find a text for which a parameter takes a number or a boolean alone."""
    kind = parameter.annotation
    annotation = kind if isinstance(kind, str) else kind.__name__ if inspect.isclass(kind) else str(kind)
    is_numeric = _NUMERIC.search(annotation) and not _OTHER.search(annotation) and not _LIST.search(annotation)
    if isinstance(value, str) and "${" not in value and is_numeric:
        noun = "true or false" if {*_NUMERIC.findall(annotation)} == {"bool"} else "a number"
        yield Problem(key, references.redact(f"is {describe_value(value)}. Write {noun}{hint_at_quotes(value)}."))


def _explain_unknown(name: str, known: list[str], target: str) -> str:
    takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return f"{target} has no such argument{did_you_mean(name, known) or f'; {takes}'}"


def _check_groups(optimizer: Optimizer, kind: Callable[..., Any], *, key: str) -> Iterator[Problem]:
    """Find settings of parameter groups that a class of optimizers doesn't take; torch would keep them unused."""
    parameters = list(parameters_of(kind).values())
    if not inspect.isclass(kind) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters][1:]
    for index, group in enumerate(optimizer.groups):
        for name in group.settings:
            if name not in known:
                yield Problem(f"{key}.groups[{index}].{name}", _explain_unknown(name, known, optimizer.target))


# Building


def build(component: Component, *args: object, key: str, allowed: tuple[str, ...]) -> Any:
    """Call a component, whose references `references.fill_in` has replaced, with ``args`` and its own arguments.

    Nested components are built first.
    """
    return bind(component, key=key, allowed=allowed, scheduled=args if key == "scheduler" else ())(*args)


def bind(
    component: Component, *, key: str, allowed: tuple[str, ...], scheduled: tuple[object, ...] = ()
) -> Callable[..., Any]:
    """Return the function that a component names, its own arguments filled in; nested components are built once.

    ``scheduled`` is the optimizer, if nested components may be schedulers. The function raises ExperimentError in place
    of an exception, which is the cause.
    """
    function = resolve(component, key=key, allowed=allowed)
    arguments = _build_inside(component.arguments, key=key, allowed=allowed, scheduled=scheduled)
    for name in _WEIGHTS:
        if isinstance(arguments.get(name), list) and takes_tensor(parameters_of(function).get(name)):
            import torch  # not in processes that build no component

            with suppress(TypeError, ValueError):  # not numbers, or lists of several lengths: torch refuses the list
                arguments[name] = torch.tensor(arguments[name], dtype=torch.float32)
    by_name = bool(scheduled) and _OPTIMIZER in parameters_of(function)
    return partial(_call, function, component, key, arguments, by_name)


def takes_tensor(parameter: inspect.Parameter | None) -> bool:
    """Return True if the type of a parameter is a tensor, perhaps among others, but no list."""
    kind = str(parameter.annotation) if parameter is not None else ""
    return "Tensor" in kind and not _LIST.search(kind)


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
        text = references.redact(" ".join(str(error).split()))[:300]
        place = targets.own_place(error, component.target.partition(".")[0])
        raise ExperimentError.of(key, f"{component.target} raised {type(error).__name__}: {text}{place}") from error


def _build_inside(value: Any, *, key: str, allowed: tuple[str, ...], scheduled: tuple[object, ...]) -> Any:
    """Build the components inside a value."""
    if isinstance(value, str) and (unknown := references.explain_unknown(value)):
        raise ExperimentError.of(key, unknown)
    built: dict[Any, Any] = {}
    for name, inner in _iter_items(value):
        where = keys.child(key, name)
        if not _is_component(inner):
            built[name] = _build_inside(inner, key=where, allowed=allowed, scheduled=scheduled)
            continue
        component = _make_component(inner, where)
        create = bind(component, key=where, allowed=allowed, scheduled=scheduled)
        takes_it = scheduled and _OPTIMIZER in parameters_of(resolve(component, key=where, allowed=allowed))
        built[name] = create(*scheduled) if takes_it else create()
    return built if isinstance(value, Mapping) else list(built.values()) if isinstance(value, list | tuple) else value


def _iter_items(value: Any) -> Iterator[tuple[keys.Part, Any]]:
    """Yield the entries of a mapping or list; nothing for other values."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _make_component(mapping: Mapping[str, Any], key: str) -> Component:
    try:
        return Component.model_validate(dict(mapping), by_alias=True, by_name=False)
    except ValidationError:
        message = f"is {mapping['_target_']!r}; write _target_: package.name"
        raise ExperimentError.of(f"{key}._target_", message) from None
