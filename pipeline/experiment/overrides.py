"""Overrides from the command line: ``train.epochs=3``, ``benchmark.rounds=8``, ``optimizer={_target_: ...}``."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.experiment import keys, lines
from pipeline.experiment.dialect import written
from pipeline.experiment.lines import Line
from pipeline.experiment.messages import shown
from pipeline.experiment.sweep import Parameter

_SWEPT = ("sweep", "parameters")
"""Section whose names are dotted keys themselves."""


def override(key: str, value: object) -> str:
    """Return the override that sets a value, e.g. "optimizer.lr=0.1"."""
    return f"{key}={written(value)}"


def apply_overrides(overrides: Sequence[str], tree: dict[str, Any], entries: dict[str, Line | str]) -> list[Problem]:
    """Set each override in ``tree``, and record it in ``entries`` as the origin of its key.

    A value replaces a whole section. Returns the problems of the overrides that can't be set.

    Raises:
        UsageError: an override is not ``key=value``.
    """
    problems = []
    for override in overrides:
        key, text = _split(override)
        try:
            value = lines.parse(text, place=lambda _: "", depth=len(keys.split(key)), in_shell=True)[0]
            key, value = _of_parameter(key, value)
            _set(tree, key, value)
        except ExperimentError as error:
            problems += [Problem(_inside(key, p.key), p.message, lines.of_override(override)) for p in error.problems]
        else:
            _note(entries, key, override)
    return problems


def _split(override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    if equals and key.startswith("-"):
        raise UsageError(f"{override}: not an option. Write {override.lstrip('-')}, without dashes.")
    try:
        keys.split(key)
    except ValueError:
        equals = ""
    if not equals:
        raise UsageError(f"{override!r} is not an override. Write key=value without spaces, e.g. train.epochs=3.")
    return key, value


def _inside(key: str, inner: str) -> str:
    """Return the full key of a problem inside an override's value."""
    return f"{key}{'' if inner.startswith('[') or not inner else '.'}{inner}"


def _of_parameter(key: str, value: object) -> tuple[str, object]:
    """Turn ``sweep.parameters.optimizer.lr.grid`` into ``sweep.parameters.optimizer.lr``: a parameter has one kind."""
    *parameter, kind = keys.split(key)
    is_inside = len(parameter) > len(_SWEPT) and (parameter[0], parameter[1]) == _SWEPT
    is_kind = kind in Parameter.model_fields and not isinstance(
        value, Mapping
    )  # a mapping of kinds is a whole parameter
    return (keys.join(parameter), {str(kind): value}) if is_inside and is_kind else (key, value)


def _path(key: str) -> tuple[keys.Part, ...]:
    """Split a key into section names; the name of a sweep parameter keeps its dots."""
    parts = keys.split(key)
    depth = len(_SWEPT)
    return (*_SWEPT, keys.join(parts[depth:])) if parts[:depth] == _SWEPT and len(parts) > depth else parts


def _set(tree: dict[str, Any], key: str, value: object) -> None:
    """Set the value; create the sections on the way that the file lacks."""
    parts = _path(key)
    section: Any = tree
    for n, part in enumerate(parts):
        last = n == len(parts) - 1
        if isinstance(section, dict):
            if section.get(str(part)) is None and not last:
                section[str(part)] = {}
            index: str | int = str(part)
        elif isinstance(section, list) and str(part).isdecimal() and int(part) < len(section):
            index = int(part)
        else:
            raise ExperimentError([Problem("", _no_place(keys.join(parts[:n]), section, part))])
        if last:
            section[index] = value
        else:
            section = section[index]


def _no_place(key: str, section: object, part: keys.Part) -> str:
    if isinstance(section, list):
        return f"{key} has no entry {part}. It has {len(section)} entries, counted from 0."
    return f"{key} is {shown(section)}. Keys inside it cannot be set."


def _note(entries: dict[str, Line | str], key: str, override: str) -> None:
    normal = list(keys.ancestors(key))[1]
    for known in [known for known in entries if known.startswith((f"{normal}.", f"{normal}["))]:
        del entries[known]
    entries[normal] = override
    for section in list(keys.ancestors(normal))[1:]:
        entries.setdefault(section, override)
