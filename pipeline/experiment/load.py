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

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import (
    deferred,
    interpolation,
    keys,
    lightning_module,
    messages,
    source,
    sweep,
    tracking_address,
)
from pipeline.experiment.consistency import contradictions
from pipeline.experiment.lines import Places
from pipeline.experiment.overrides import apply_overrides, override
from pipeline.experiment.schema import Experiment
from pipeline.experiment.source import Source

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
    bases: tuple[Path, ...] = ()
    """Files that it extends, the nearest first."""

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
        read = Source(tree, dict(self.places.entries), self.bases)
        return checked(self.places.name, read, [override(key, values[key]) for key in values])

    def explain(self, problems: Iterable[Problem]) -> ExperimentError:
        """Return an error with the places of all problems, in the order of the file."""
        return _explain(problems, self.places)


def load(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment file, with ``key=value`` overrides applied before interpolation.

    Raises:
        UsageError: the file can't be read, or an override is malformed.
        ExperimentError: the file is wrong; holds every problem that was found.
    """
    return checked(str(path), source.read(str(path)), overrides)


def from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment from the contents of a file as dicts, lists, strings and numbers.

    Raises:
        UsageError: an override is malformed.
        ExperimentError: a value is wrong; holds every problem that was found.
    """
    try:
        problems = list(_not_plain(values, ()))
    except RecursionError:
        raise ExperimentError([Problem("", "contains itself. Write out its values.", _IN_PYTHON)]) from None
    if problems:
        raise ExperimentError(problems)
    own = source.Source(_copied(values))
    return checked(_IN_PYTHON, source.extended(own, name=_IN_PYTHON, folder=Path()), overrides)


def checked(name: str, read: Source, overrides: Sequence[str]) -> ExperimentFile:
    """Validate what was read, with overrides, which are written into it. Raises as `load` does."""
    tree = read.tree
    rejected = apply_overrides(overrides, tree, read.entries)
    rejected += tracking_address.fill_in(tree)
    places = Places(name, read.entries)
    if source.EXTENDS in tree:
        rejected.append(Problem(source.EXTENDS, "works only in files. Set it in the experiment file."))
    resolved, problems = interpolation.resolve(tree)
    problems += [*deferred.early_values(resolved), *deferred.exposed_secrets(tree)]
    try:
        experiment = Experiment.model_validate(resolved, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += _unreported(messages.problems(error, Experiment, resolved), problems)
    else:
        problems += _unreported(contradictions(experiment), problems)
    if problems or rejected:
        raise _explain([*problems, *rejected], places)
    file = ExperimentFile(Path(name), experiment, places, tree, read.bases)
    if wrong := sweep.problems(experiment.sweep, file.varied):
        raise file.explain(wrong)
    return file


def _explain(problems: Iterable[Problem], places: Places) -> ExperimentError:
    problems = [p._replace(key=lightning_module.as_written(p.key, places.entries)) for p in problems]
    return ExperimentError([p if p.place else p._replace(place=places.locate(p.key)) for p in places.sorted(problems)])


def _unreported(problems: Iterable[Problem], reported: Sequence[Problem]) -> list[Problem]:
    """Drop the problems that follow from one already reported for the same key or a section around it."""
    known = {problem.key for problem in reported}
    return [problem for problem in problems if known.isdisjoint(keys.ancestors(problem.key))]


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
