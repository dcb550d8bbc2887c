"""References that a worker resolves when it builds a component: ``${total_steps}`` and its like, and secrets.

Run-time values are known once the data is loaded. Secrets such as ``${oc.env:API_KEY}`` must not be shown or written
down. An `Experiment` holds both as they stand in the file.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import keys
from pipeline.config.jsonschema import Shape
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, Problem

RUNTIME_VALUES = ("total_steps", "steps_per_epoch", "world_size")
"""Optimizer steps of the whole training; steps of an epoch; processes."""

_NEED_DATA = ("total_steps", "steps_per_epoch")
_SHOWN_WITHOUT_CREDENTIALS = ("tracking", "uri")
"""The only key outside of components that may hold a secret: the schema serializes it without credentials."""
_MARKER = re.compile(r"\$\{(" + "|".join(RUNTIME_VALUES) + r")\}")
_SECRET = re.compile(
    r"(?<!\\)\$\{oc\.env:\s*(\w*(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_\w*)?)\s*(?:,([^{}]*))?\}", re.I
)

_Parts = tuple[keys.Part, ...]


def marker(name: str) -> str:
    """Return the reference to a run-time value, e.g. "${total_steps}"."""
    return f"${{{name}}}"


def runtime_values_in(text: str) -> tuple[str, ...]:
    """Return the names of the run-time values that a text refers to."""
    return tuple(_MARKER.findall(text))


def secrets_in(text: str) -> tuple[str, ...]:
    """Return the secret environment variables that a text refers to, e.g. "HF_TOKEN" of ``${oc.env:HF_TOKEN}``."""
    return tuple(found[1] for found in _SECRET.finditer(text))


def fill_in(text: str, values: Mapping[str, int], *, key: str) -> str | int:
    """Replace run-time values by their numbers, and references to secrets by this process's environment.

    A text that is nothing but one run-time value becomes its number.

    Raises:
        ExperimentError: a run-time value is not known yet, or a variable is not set in this process.
    """
    for name in runtime_values_in(text):
        if name not in values:
            raise ExperimentError.of(key, f"{marker(name)} is not known yet when this is built; write a number")
    if whole := _MARKER.fullmatch(text):
        return values[whole[1]]
    filled = _MARKER.sub(lambda found: str(values[found[1]]), text)
    return _SECRET.sub(lambda found: _secret(found[1], default=found[2], key=key), filled)


def _secret(name: str, *, default: str | None, key: str) -> str:
    if (value := os.environ.get(name, default)) is not None:
        return value
    where = f"on {os.uname().nodename}, where the worker runs"
    raise ExperimentError.of(
        key, f"the environment variable {name} is not set {where}; secrets aren't sent there: set it on each node"
    )


def with_secrets_escaped(value: Any, parts: _Parts = ()) -> Any:
    """Escape the references to secrets in a tree, so that OmegaConf leaves them to the workers."""
    if isinstance(value, Mapping):
        return {name: with_secrets_escaped(inner, (*parts, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_secrets_escaped(inner, (*parts, index)) for index, inner in enumerate(value)]
    if isinstance(value, str) and parts != _SHOWN_WITHOUT_CREDENTIALS:
        return _SECRET.sub(lambda found: "\\" + found[0], value)
    return value


def early_values(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Find run-time values in places that are read before the data is loaded."""
    for parts, text in keys.walk(tree):
        names = runtime_values_in(text) if isinstance(text, str) else ()
        early = [name for name in names if name in _NEED_DATA]
        if names and not Shape.of(Experiment).in_component(parts):
            message = (
                f"{marker(names[0])} is only known once the data is loaded; "
                "it may stand in the arguments of scheduler, optimizer and other components"
            )
        elif early and parts[0] in ("data", "loader"):
            message = f"{marker(early[0])} is only known once the data is loaded; write a number"
        else:
            continue
        yield Problem(keys.join(parts), message)


def exposed_secrets(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Find secrets in places that are shown or written down."""
    for parts, text in keys.walk(tree):
        if not isinstance(text, str) or not (names := secrets_in(text)) or parts == _SHOWN_WITHOUT_CREDENTIALS:
            continue
        before = [text[: found.start()] for found in _SECRET.finditer(text)]
        if not Shape.of(Experiment).in_component(parts):
            message = f"{names[0]} is a secret by its name, and this would be written down; rename the variable"
        elif any(start.count("${") > start.count("}") for start in before):  # such as ${oc.decode:${oc.env:API_KEY}}
            message = (
                f"{names[0]} is a secret by its name, which no resolver may use; write ${{oc.env:{names[0]}}} alone"
            )
        else:
            continue
        yield Problem(keys.join(parts), message)
