"""Loading: from a YAML file or a mapping, and overrides, to an `Experiment`; start reading at `load`.

Every problem is collected and reported at once, with its file and line.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import deferred, interpolation, keys, lines, messages, sweep
from pipeline.config.consistency import contradictions
from pipeline.config.lines import Places
from pipeline.config.overrides import apply_overrides, override
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.wording import did_you_mean

_MOST_BYTES = 2**20
_IN_PYTHON = "experiment"  # instead of a file name in messages
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ExperimentFile:
    """A validated experiment with the place of each of its keys."""

    path: Path
    experiment: Experiment
    places: Places
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Values of the file and its overrides, before ``${...}`` is resolved; may hold secrets."""

    @property
    def source(self) -> str:
        """Path of the file relative to the working directory; empty if the experiment was written in Python."""
        return os.path.relpath(self.path) if self.path.is_file() else ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that are in force, as they were written."""
        return tuple(dict.fromkeys(entry for entry in self.places.entries.values() if isinstance(entry, str)))

    def varied(self, values: Mapping[str, Any]) -> "ExperimentFile":
        """Return the experiment without its sweep and with other values, by dotted key.

        Raises:
            ExperimentError: a value is invalid.
        """
        tree = deepcopy(dict(self.tree))
        tree.pop("sweep", None)
        entries = dict(self.places.entries)
        return checked(self.places.name, tree, entries, [override(key, values[key]) for key in values])

    def explain(self, problems: Iterable[Problem]) -> ExperimentError:
        """Return an error with the places of all problems, in the order of the file."""
        return _explain(problems, self.places)


def load(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment file, with ``key=value`` overrides applied before interpolation.

    Raises:
        UsageError: the file can't be read, or an override is malformed.
        ExperimentError: the file is wrong; holds every problem that was found.
    """
    tree, file_lines = _parse(_read(Path(path)), str(path))
    return checked(str(path), tree, dict(file_lines), overrides)


def from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment from the contents of a file as dicts, lists, strings and numbers.

    Raises:
        UsageError: an override is malformed.
        ExperimentError: a value is wrong; holds every problem that was found.
    """
    try:
        problems = list(_not_plain(values, ()))
    except RecursionError:
        raise ExperimentError([Problem("", "contains itself; write its values out", _IN_PYTHON)]) from None
    if problems:
        raise ExperimentError(problems)
    return checked(_IN_PYTHON, _copied(values), {}, overrides)


def checked(name: str, tree: dict[str, Any], entries: dict[str, int | str], overrides: Sequence[str]) -> ExperimentFile:
    """Validate a tree whose keys come from the lines in ``entries``; both are modified. Raises as `load` does."""
    rejected = apply_overrides(overrides, tree, entries)
    places = Places(name, entries)
    resolved, problems = interpolation.resolve(deferred.with_secrets_escaped(tree))
    problems += [*deferred.early_values(resolved), *deferred.exposed_secrets(tree)]
    try:
        experiment = Experiment.model_validate(resolved, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += _unreported(messages.problems(error, Experiment, resolved), problems)
    else:
        problems += _unreported(contradictions(experiment), problems)
    if problems or rejected:
        raise _explain([*problems, *rejected], places)
    file = ExperimentFile(Path(name), experiment, places, tree)
    if wrong := sweep.problems(experiment.sweep, file.varied):
        raise file.explain(wrong)
    return file


def _explain(problems: Iterable[Problem], places: Places) -> ExperimentError:
    return ExperimentError([p if p.place else p._replace(place=places.locate(p.key)) for p in places.sorted(problems)])


def _unreported(problems: Iterable[Problem], reported: Sequence[Problem]) -> list[Problem]:
    """Drop the problems that follow from one already reported for the same key or a section around it."""
    known = {problem.key for problem in reported}
    return [problem for problem in problems if known.isdisjoint(keys.ancestors(problem.key))]


def _parse(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    tree, file_lines = lines.parse(text, place=lambda line: f"{name}:{line}")
    if tree is None:
        raise ExperimentError([Problem("", "is empty; an experiment begins with name: my-experiment", name)])
    if not isinstance(tree, dict):
        raise ExperimentError(
            [Problem("", f"is {messages.shown(tree)}; write sections such as model: and data:", name)]
        )
    return tree, file_lines


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:  # limited: it may be a device or a checkpoint
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            message = f"is larger than {_MOST_BYTES // 2**20} MiB; is it an experiment?"
            raise ExperimentError([Problem("", message, str(path))])
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file{_others(path.parent, meant=str(path))}") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder{_others(path)}") from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ExperimentError([Problem("", message, f"{path}:{line}")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: can't be read: {reason}") from None


def _others(folder: Path, *, meant: str = "") -> str:
    """Suggest the experiment file that was probably meant, or list the existing ones."""
    if not folder.is_dir():
        return f"; the folder {folder} doesn't exist either"
    there = sorted(str(file) for file in folder.glob("*.y*ml"))
    hint = did_you_mean(meant, there, cutoff=0.7)
    return hint or (f"; there are {', '.join(there[:5])}" if there else f"; there is no YAML file in {folder}")


def _copied(value: Any) -> Any:
    """Copy a value to plain dicts and lists, as YAML would give it, so that nothing is shared with the caller."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


def _not_plain(value: object, parts: tuple[keys.Part, ...]) -> Iterator[Problem]:
    """Find values that no YAML file could hold."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(name, str):
                yield from _not_plain(inner, (*parts, name))
            else:
                yield Problem(keys.join(parts), f"the key {name!r} is not a string; put it in quotes", _IN_PYTHON)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_plain(inner, (*parts, index))
    elif callable(value) and hasattr(value, "__qualname__"):
        written = f'write its dotted name, "{value.__module__}.{value.__qualname__}"'
        yield Problem(keys.join(parts), f"is the object {value.__qualname__}; {written}", _IN_PYTHON)
    elif type(value) not in _PLAIN:
        message = f"is of type {type(value).__name__}; write strings, numbers, lists and dicts"
        yield Problem(keys.join(parts), message, _IN_PYTHON)
