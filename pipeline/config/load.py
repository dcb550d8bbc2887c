"""From a file and overrides to an Experiment, with every problem reported at once: start reading at `load`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import deferred, interpolation, keys, lines, messages, sweep
from pipeline.config.consistency import contradictions
from pipeline.config.jsonschema import experiment_json_schema
from pipeline.config.lines import Places
from pipeline.config.overrides import apply_overrides, override
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.wording import did_you_mean

__all__ = ["ExperimentFile", "checked", "experiment_json_schema", "load"]

_MOST_BYTES = 2**20
_IN_PYTHON = "experiment"  # instead of a file name in messages
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class ExperimentFile:
    """An experiment and where each of its keys stands."""

    path: Path
    experiment: Experiment
    places: Places
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the file says, with its overrides, before ``${...}`` is replaced; it may hold secrets."""

    @property
    def source(self) -> str:
        """The file relative to this folder; empty if the experiment was written in Python."""
        return os.path.relpath(self.path) if self.path.is_file() else ""

    def varied(self, values: Mapping[str, Any]) -> "ExperimentFile":
        """The same without its sweep and with other values, by dotted key.

        Raises:
            ExperimentError: they don't go together.
        """
        tree = deepcopy(dict(self.tree))
        tree.pop("sweep", None)
        entries = dict(self.places.entries)
        return checked(self.places.name, tree, entries, [override(key, values[key]) for key in values])

    def locate(self, key: str) -> str:
        """Of "train.epochs": "experiments/resnet.yaml:9" its line, or the nearest section's around it."""
        return self.places.locate(key)

    def explain(self, problems: Iterable[Problem]) -> ExperimentError:
        """An error with the places of all problems, in the order of the file."""
        return _explain(problems, self.places)


def load(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentFile:
    """The experiment in a file, with ``key=value`` overrides applied before interpolation.

    Raises:
        UsageError: the file can't be read, or an override is malformed.
        ExperimentError: the file is wrong; carries every problem that was found.
    """
    tree, file_lines = _parse(_read(Path(path)), str(path))
    return checked(str(path), tree, dict(file_lines), overrides)


def from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentFile:
    """The experiment in what a file would hold, as dicts, lists, texts and numbers.

    Raises:
        UsageError: an override is malformed.
        ExperimentError: something in it is wrong; carries every problem that was found.
    """
    try:
        problems = list(_strange(values, ()))
    except RecursionError:
        raise ExperimentError([Problem("", "holds itself; write it out", _IN_PYTHON)]) from None
    if problems:
        raise ExperimentError(problems)
    return checked(_IN_PYTHON, _copied(values), {}, overrides)


def checked(name: str, tree: dict[str, Any], entries: dict[str, int | str], overrides: Sequence[str]) -> ExperimentFile:
    """The experiment of a tree, whose keys stand in the lines of ``entries``; both are changed. See `load`."""
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
    """Without those that follow from a problem with the same key or its section."""
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
        with path.open("rb") as file:  # not all of it: it may be a device, or a checkpoint
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
        message = f"is not a text in UTF-8 (byte {error.start + 1}); save it as UTF-8"
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ExperimentError([Problem("", message, f"{path}:{line}")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: can't be read: {reason}") from None


def _others(folder: Path, *, meant: str = "") -> str:
    """The experiment that was probably meant, or those that are there."""
    if not folder.is_dir():
        return f"; the folder {folder} doesn't exist either"
    there = sorted(str(file) for file in folder.glob("*.y*ml"))
    hint = did_you_mean(meant, there, cutoff=0.7)
    return hint or (f"; there are {', '.join(there[:5])}" if there else f"; there is no YAML file in {folder}")


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
                yield Problem(keys.join(parts), f"the key {name!r} is not a text; put it in quotes", _IN_PYTHON)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _strange(inner, (*parts, index))
    elif callable(value) and hasattr(value, "__qualname__"):
        written = f'write its dotted name, "{value.__module__}.{value.__qualname__}"'
        yield Problem(keys.join(parts), f"is {value.__qualname__} itself; {written}", _IN_PYTHON)
    elif type(value) not in _PLAIN:
        message = f"is a {type(value).__name__}; write texts, numbers, lists and dicts"
        yield Problem(keys.join(parts), message, _IN_PYTHON)
