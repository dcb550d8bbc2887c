"""An experiment that is written in Python instead of a file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config import keys
from pipeline.config.load import ExperimentFile, checked
from pipeline.errors import ExperimentError, Problem

_NAME = "experiment"  # stands for the file's in messages
_PLAIN = (str, int, float, bool, type(None))


def from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentFile:
    """The experiment in what a file would hold, as dicts, lists, texts and numbers.

    Raises:
        UsageError: an override is malformed.
        ExperimentError: something in it is wrong; carries every problem that was found.
    """
    try:
        problems = list(_strange(values, ()))
    except RecursionError:
        raise ExperimentError([Problem("", "holds itself; write it out", _NAME)]) from None
    if problems:
        raise ExperimentError(problems)
    return checked(_NAME, _copied(values), {}, overrides)


def _copied(value: Any) -> Any:
    """The value as YAML would give it, so that nothing is shared with the caller's."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def _strange(value: object, parts: tuple[keys.Part, ...]) -> Iterator[Problem]:
    """What couldn't stand in a file, and what to write instead."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(name, str):
                yield from _strange(inner, (*parts, name))
            else:
                yield Problem(keys.join(parts), f"the key {name!r} is not a text; put it in quotes", _NAME)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _strange(inner, (*parts, index))
    elif callable(value) and hasattr(value, "__qualname__"):
        written = f'write its dotted name, "{value.__module__}.{value.__qualname__}"'
        yield Problem(keys.join(parts), f"is {value.__qualname__} itself; {written}", _NAME)
    elif type(value) not in _PLAIN:
        message = f"is a {type(value).__name__}; write texts, numbers, lists and dicts"
        yield Problem(keys.join(parts), message, _NAME)
