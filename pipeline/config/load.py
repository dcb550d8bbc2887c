"""From a file and overrides to an Experiment, with every problem reported at once: start reading at `load`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import interpolation, keys, lines, messages, runtime, secrets, variation
from pipeline.config.consistency import contradictions
from pipeline.config.jsonschema import Shape, experiment_json_schema
from pipeline.config.lines import Places
from pipeline.config.nearest import did_you_mean
from pipeline.config.overrides import apply_overrides
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, Problem, UsageError

__all__ = ["ExperimentFile", "checked", "experiment_json_schema", "load"]

_MOST_BYTES = 2**20
_KEEPS_SECRETS = ("tracking", "uri")  # which is written down without its credentials


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
        return checked(self.places.name, tree, entries, [variation.override(key, values[key]) for key in values])

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


def checked(name: str, tree: dict[str, Any], entries: dict[str, int | str], overrides: Sequence[str]) -> ExperimentFile:
    """The experiment of a tree, whose keys stand in the lines of ``entries``; both are changed. See `load`."""
    rejected = apply_overrides(overrides, tree, entries)
    places = Places(name, entries)
    resolved, problems = interpolation.resolve(_without_secrets(tree, ()))
    problems += _misplaced(resolved) + _exposed(tree)
    try:
        experiment = Experiment.model_validate(resolved, by_alias=True, by_name=False)
    except ValidationError as error:
        problems += _unreported(messages.problems(error, Experiment, resolved), problems)
    else:
        problems += _unreported(contradictions(experiment), problems)
    if problems or rejected:
        raise _explain([*problems, *rejected], places)
    file = ExperimentFile(Path(name), experiment, places, tree)
    if wrong := variation.problems(experiment, file.varied):
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


def _misplaced(tree: Mapping[str, Any]) -> list[Problem]:
    """Run-time values where no component is built with them."""
    problems = []
    for parts, text in _texts(tree, ()):
        names = runtime.named_in(text)
        early = [name for name in names if name in runtime.NEEDS_DATA]
        if names and not Shape.of(Experiment).in_component(parts):
            message = (
                f"{runtime.marker(names[0])} is only known once the data is loaded; "
                "it may stand in the arguments of scheduler, optimizer and other components"
            )
        elif early and parts[0] in ("data", "loader"):
            message = f"{runtime.marker(early[0])} is only known once the data is loaded; write a number"
        else:
            continue
        problems.append(Problem(keys.join(parts), message))
    return problems


def _without_secrets(value: Any, parts: tuple[keys.Part, ...]) -> Any:
    """The value with references to secrets left alone where components get them: their worker puts the values in."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(inner, (*parts, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner, (*parts, index)) for index, inner in enumerate(value)]
    return secrets.held_back(value) if isinstance(value, str) and parts != _KEEPS_SECRETS else value


def _exposed(tree: Mapping[str, Any]) -> list[Problem]:
    """Secrets where they would be shown or written down."""
    problems = []
    for parts, text in _texts(tree, ()):
        if not (names := secrets.named_in(text)) or parts == _KEEPS_SECRETS:
            continue
        if not Shape.of(Experiment).in_component(parts):
            message = f"{names[0]} is a secret by its name, and this would be written down; rename the variable"
        elif secrets.is_inside(text):
            message = f"{names[0]} is a secret by its name, which stays a text; write ${{oc.env:{names[0]}}} alone"
        else:
            continue
        problems.append(Problem(keys.join(parts), message))
    return problems


def _texts(value: object, parts: tuple[keys.Part, ...]) -> Iterator[tuple[tuple[keys.Part, ...], str]]:
    if isinstance(value, str):
        yield parts, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _texts(inner, (*parts, name))
