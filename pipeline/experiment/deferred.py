"""References that a worker resolves when it builds a component: ``${total_steps}`` and its like, and the environment.

Run-time values are known once the data is loaded. Values of environment variables are not written down, see
`pipeline.experiment.environment`. An `Experiment` holds both as references.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import environment, keys
from pipeline.experiment.jsonschema import Shape
from pipeline.experiment.schema import Experiment

RUNTIME_VALUES = ("total_steps", "steps_per_epoch", "world_size")
"""Optimizer steps of the whole training; steps of an epoch; processes."""

_NEED_DATA = ("total_steps", "steps_per_epoch")
_SHOWN_WITHOUT_CREDENTIALS = ("tracking", "uri")
"""The only key outside of components that may hold a secret: the schema serializes it without credentials."""
_SWEPT = ("sweep", "parameters")
MARKER = re.compile(r"\$\{(" + "|".join(RUNTIME_VALUES) + r")\}")
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*(\w+)")

_Parts = tuple[keys.Part, ...]


def marker(name: str) -> str:
    """Return the reference to a run-time value, e.g. "${total_steps}"."""
    return f"${{{name}}}"


def runtime_values_in(text: str) -> tuple[str, ...]:
    """Return the names of the run-time values that a text refers to."""
    return tuple(MARKER.findall(text))


def fill_in(text: str, values: Mapping[str, int], *, key: str) -> str | int | None:
    """Replace run-time values by their numbers, and references to environment variables by this process's values.

    Raises:
        ExperimentError: a run-time value is not known yet, or a variable is not set in this process.
    """
    filled = fill_in_runtime(text, values, key=key)
    return environment.fill_in(filled, key=key) if isinstance(filled, str) else filled


def fill_in_runtime(text: str, values: Mapping[str, int], *, key: str) -> str | int:
    """Replace run-time values by their numbers. A text that is nothing but one run-time value becomes its number.

    Raises:
        ExperimentError: a run-time value is not known yet.
    """
    for name in runtime_values_in(text):
        if name not in values:
            raise ExperimentError.of(key, f"{marker(name)} has no value yet when this is built. Use a number instead.")
    if whole := MARKER.fullmatch(text):
        return values[whole[1]]
    return MARKER.sub(lambda found: str(values[found[1]]), text)


def keeps_references(parts: _Parts) -> bool:
    """Return True if references to environment variables stay in a value: in a component's arguments and in tags.

    All other keys are read by this project itself. The values of a sweep's parameter are those of the key it varies.
    """
    if parts[: len(_SWEPT)] == _SWEPT and len(parts) > len(_SWEPT) + 1:
        try:
            parts = (*keys.split(str(parts[len(_SWEPT)])), *parts[len(_SWEPT) + 3 :])
        except ValueError:  # reported as a problem of the sweep
            return False
    return parts[:2] == ("tracking", "tags") or Shape.of(Experiment).in_arguments(parts)


def shows_everything(parts: _Parts) -> bool:
    """Return True if a key may refer to any variable, since it is written without credentials."""
    return parts == _SHOWN_WITHOUT_CREDENTIALS


def early_values(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Find run-time values in places that are read before the data is loaded."""
    for parts, text in keys.walk(tree):
        names = runtime_values_in(text) if isinstance(text, str) else ()
        early = [name for name in names if name in _NEED_DATA]
        if names and not Shape.of(Experiment).in_component(parts):
            message = (
                f"{marker(names[0])} has no value until the data is loaded. "
                "Use it only in the arguments of scheduler, optimizer and other components."
            )
        elif early and parts[0] in ("data", "sampler", "loader"):
            message = f"{marker(early[0])} has no value until the data is loaded. Use a number instead."
        else:
            continue
        yield Problem(keys.join(parts), message)


def exposed_secrets(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Find variables that are secrets by their names in places that are shown or written down."""
    for parts, text in keys.walk(tree):
        if not isinstance(text, str) or shows_everything(parts):
            continue
        found = [each for each in _VARIABLE.finditer(text) if environment.is_secret(each[1])]
        if not found:
            continue
        name, before = found[0][1], [text[: each.start()] for each in found]
        if not keeps_references(parts):
            message = f"{name} is a secret by its name, but this key is stored in files. Rename the variable."
        elif any(start.count("${") > start.count("}") for start in before):  # such as ${oc.decode:${oc.env:API_KEY}}
            message = f"{name} is a secret by its name, so resolvers cannot use it. Write only ${{oc.env:{name}}}."
        else:
            continue
        yield Problem(keys.join(parts), message)
