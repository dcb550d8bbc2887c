"""Components: ``_target_`` with its arguments, checked before anything starts and built where training runs."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.errors import ExperimentError, PipelineError, Problem
from pipeline.experiment import component_arguments, environment, extras, keys, targets
from pipeline.experiment.deferred import fill_in
from pipeline.experiment.finetuning import Optimizer
from pipeline.experiment.loader_section import DEFAULT_COLLATE
from pipeline.experiment.messages import shown
from pipeline.experiment.named_optimizers import own_problems
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Component

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


def resolve(component: Component, *, key: str, allowed: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class or function that a component names.

    Raises:
        ExperimentError: it is not allowed, also with its arguments; not found, or its package can't be imported.
    """
    return targets.find(component.target, key=key, allowed=allowed)


class Checked(NamedTuple):
    """What is wrong with the components of an experiment, also nested ones, before any is called."""

    problems: list[Problem]
    rejected: list[Problem]
    """The problems that are components which are not allowed or not found."""


def check(experiment: Experiment, *, allowed: tuple[str, ...]) -> Checked:
    """Find what is wrong with the components without calling them; imports their packages."""
    problems, rejected = list[Problem](), list[Problem]()
    for key, component in named(experiment):
        keys_of = (key.partition("[")[0], key.partition(".")[0], component.target)
        passed = next((_PASSED[one] for one in keys_of if one in _PASSED), ())
        found = list(_iter_resolved(component, key=key, allowed=allowed))
        rejected += [one for one in found if isinstance(one, Problem)]
        problems += _check(found, key=key, passed=passed)
        problems += environment.unset(component.arguments, key=key)
    if (
        experiment.task is not None
        and not experiment.optimizers
        and not any(one.key.startswith("task") for one in problems)
    ):
        problems += _check_task(experiment.task, allowed=allowed)
    if not any(problem.key.startswith("optimizer") for problem in problems):
        if experiment.optimizer is not None:
            problems += _check_groups(experiment.optimizer, allowed=allowed)
        for name, optimizer in experiment.optimizers.items():
            problems += own_problems(list(_check_groups(optimizer, allowed=allowed)), name)
    return Checked(problems, rejected)


def build(
    component: Component,
    *args: object,
    key: str,
    allowed: tuple[str, ...],
    runtime: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Call a component with ``args`` and its own arguments; nested components are built first.

    ``runtime`` holds the run-time values, such as ``${total_steps}``, by name.

    Raises:
        ExperimentError: it can't be found or imported, or raises an exception, which is the cause.
    """
    scheduled = args if key == "scheduler" else ()
    return bound(component, key=key, allowed=allowed, runtime=runtime, scheduled=scheduled)(*args)


def bound(
    component: Component,
    *,
    key: str,
    allowed: tuple[str, ...],
    runtime: Mapping[str, int] = MappingProxyType({}),
    scheduled: tuple[object, ...] = (),
) -> Callable[..., Any]:
    """Return the function that a component names, its own arguments filled in; nested components are built once.

    ``scheduled`` is the optimizer, if nested components may be schedulers. The function raises ExperimentError in place
    of an exception, which is the cause.

    Raises:
        ExperimentError: it can't be found or imported, or a nested component can't be built.
    """
    function = resolve(component, key=key, allowed=allowed)
    parameters = component_arguments.parameters_of(function)
    built = _built(component.arguments, key=key, allowed=allowed, known=runtime, scheduled=scheduled)
    arguments = component_arguments.with_tensors(built, parameters)
    by_name = bool(scheduled) and component_arguments.takes_optimizer(function)

    def call(*args: object) -> Any:
        try:
            return (
                function(**{component_arguments.OPTIMIZER: args[0]}, **arguments)
                if by_name
                else function(*args, **arguments)
            )
        except PipelineError:
            raise
        except Exception as error:  # whatever a constructor raises, its arguments in the file led to it
            said = environment.redact(" ".join(str(error).split()))
            message = f"{component.target} raised {type(error).__name__}: {said[:300]}"
            wrong = (
                component_arguments.find_wrong_type(error, arguments, parameters)
                if isinstance(error, TypeError | ValueError)
                else None
            )
            if wrong is not None:
                name, remedy = wrong
                message = f"is {shown(component.arguments[name])}. {remedy} {message}"
                raise ExperimentError.of(keys.child(key, name), message) from error
            raise ExperimentError.of(key, message) from error

    return call


def named(experiment: Experiment) -> Iterator[tuple[str, Component]]:
    """Yield the components of an experiment with their keys, except nested ones."""
    for name in ("model", "data", "sampler", "loss", "task", "optimizer", "scheduler"):
        if component := getattr(experiment, name):
            yield name, component
    for section in ("optimizers", "schedulers"):
        for name, component in getattr(experiment, section).items():
            yield keys.child(section, name), component
    for name in ("collate", "evaluation_collate"):
        if component := getattr(experiment.loader, name):
            yield f"loader.{name}", component
    if component := experiment.train.batch_transform:
        yield "train.batch_transform", component
    for name, component in experiment.metrics.items():
        yield f"metrics.{name}", component
    for number, component in enumerate(experiment.hooks):
        yield keys.child("hooks", number), component
    yield from experiment.tracking.custom_loggers.items()


class _Resolved(NamedTuple):
    """A component with its key, and the class or function that it names."""

    key: str
    component: Component
    function: Callable[..., Any]


def _check(all_found: Iterable[_Resolved | Problem], *, key: str, passed: Sequence[str]) -> list[Problem]:
    problems: list[Problem] = []
    for found in all_found:
        if isinstance(found, Problem):
            problems.append(found)
            continue
        is_passed = found.key == key or (
            passed == _PASSED["scheduler"] and component_arguments.takes_optimizer(found.function)
        )
        given = passed if is_passed else ()
        problems += component_arguments.check(found.function, found.component, key=found.key, passed=given)
        if needed := extras.missing(found.function):
            problems.append(Problem(f"{found.key}._target_", needed))
    return problems


def _iter_resolved(component: Component, *, key: str, allowed: tuple[str, ...]) -> Iterator[_Resolved | Problem]:
    """Yield a component and those nested in it, or what is wrong with their names."""
    try:
        yield _Resolved(key, component, resolve(component, key=key, allowed=allowed))
    except ExperimentError as error:
        yield from error.problems
    for inner_key, mapping in _nested(component.arguments, key):
        try:
            inner = _component(mapping, inner_key)
        except ExperimentError as error:
            yield from error.problems
        else:
            yield from _iter_resolved(inner, key=inner_key, allowed=allowed)


def _check_task(task: Component, *, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """Find a task that updates several optimizers in an experiment with one optimizer."""
    kind = resolve(task, key="task", allowed=allowed)
    if not inspect.isclass(kind):
        return
    call = getattr(kind, "forward", kind.__call__)  # a module's, or another class's
    parameters = list(inspect.signature(call).parameters.values())[1:]
    given = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(given) > 2:
        message = f"{task.target} updates several optimizers (its third argument is {given[2].name})"
        yield Problem("task", f"{message}. Replace optimizer by optimizers, with one section per optimizer.")


def _check_groups(optimizer: Optimizer, *, allowed: tuple[str, ...]) -> Iterator[Problem]:
    """Find settings of parameter groups that a class of optimizers doesn't take; torch would keep them unused."""
    kind = resolve(optimizer, key="optimizer", allowed=allowed) if optimizer.groups else None
    if not inspect.isclass(kind):
        return
    parameters = inspect.signature(kind).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters][1:]
    for index, group in enumerate(optimizer.groups):
        for name in group.settings:
            if name not in known:
                message = component_arguments.describe_unknown(name, known, optimizer.target)
                yield Problem(keys.child(f"optimizer.groups[{index}]", name), message)


def _nested(value: object, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the outermost components among the arguments, with their keys."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in items:
        if isinstance(inner, Mapping) and "_target_" in inner:
            yield keys.child(key, name), inner
        else:
            yield from _nested(inner, keys.child(key, name))


def _component(mapping: Mapping[str, Any], key: str) -> Component:
    try:
        return Component.model_validate(dict(mapping), by_alias=True, by_name=False)
    except ValidationError:
        message = f"is {mapping['_target_']!r}; write _target_: package.name"
        raise ExperimentError.of(f"{key}._target_", message) from None


def _built(
    value: Any, *, key: str, allowed: tuple[str, ...], known: Mapping[str, int], scheduled: tuple[object, ...]
) -> Any:
    """Build the components inside a value, and fill in run-time values and environment variables."""
    if isinstance(value, str):
        return fill_in(value, known, key=key)

    def inner(part: Any, name: str | int) -> Any:
        where = keys.child(key, name)
        if not isinstance(part, Mapping) or "_target_" not in part:
            return _built(part, key=where, allowed=allowed, known=known, scheduled=scheduled)
        component = _component(part, where)
        create = bound(component, key=where, allowed=allowed, runtime=known, scheduled=scheduled)
        takes = bool(scheduled) and component_arguments.takes_optimizer(resolve(component, key=where, allowed=allowed))
        return create(*scheduled) if takes else create()

    if isinstance(value, list | tuple):
        return [inner(part, index) for index, part in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: inner(part, name) for name, part in value.items()}
    return value
