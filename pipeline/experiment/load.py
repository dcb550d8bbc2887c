"""Loading: from a YAML file or a mapping, and overrides, to an `Experiment`; start reading at `load`.

The keys of a file win over those of the file that it extends. Sections are merged key by key. Lists, plain values,
sweep parameters and components with a ``_target_`` of their own are replaced as a whole. Every problem is collected and
reported at once, with its file and line.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.experiment import keys, references, sweep, yaml_text
from pipeline.experiment.consistency import contradictions
from pipeline.experiment.problems import describe_value, find_problems
from pipeline.experiment.schema import Experiment
from pipeline.experiment.sweep import Parameter
from pipeline.experiment.uris import TRACKING_VARIABLE, problem_of, without_credentials, without_credentials_in
from pipeline.experiment.yaml_text import Dumper
from pipeline.wording import counted, listed, nearest

_IN_PYTHON = "experiment"  # instead of a file name in messages
_PLAIN = (str, int, float, bool, type(None))
_USUAL = "experiments"  # Folder of a project that has its experiments
_MOST_BYTES = 2**20
_REPLACED = "benchmark.baseline"  # A section that is a single choice, not several settings
_SWEPT = ("sweep", "parameters")  # Section whose names are dotted keys themselves
_COMMAND_LINE = "command line: "
_LONGEST = 200  # characters of an override in a message


class Line(NamedTuple):
    """Line of a file, counted from 1."""

    file: str  # Path of the file, as the user wrote it
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Places:
    """Origin of each key: its line in a file, or the override that set it."""

    name: str  # Path of the file, as the user wrote it
    entries: Mapping[str, Line | str]

    def locate(self, key: str) -> str:
        """Return "file:line" of a key or of the nearest section around it, or "command line: train.epochs=3"."""
        entry = next((self.entries[near] for near in keys.ancestors(key) if near in self.entries), None)
        return _format_override(entry) if isinstance(entry, str) else str(entry or self.name)

    def explain(self, found: Iterable[Problem]) -> ExperimentError:
        """Return an error with the places of problems in the order of their keys, those of overrides last."""
        rank = {key: n for n, key in enumerate(self.entries, 1)}
        is_module = "model" not in self.entries and "task.module" in self.entries  # a LightningModule's
        ordered = []
        for problem in found:
            if is_module and problem.key.split(".")[0] == "model":
                problem = problem._replace(key=f"task.module{problem.key.removeprefix('model')}")
            problem = problem if problem.place else problem._replace(place=self.locate(problem.key))
            known = next((near for near in keys.ancestors(problem.key) if near in self.entries), "")
            entry = self.entries.get(known)
            is_in_base = isinstance(entry, Line) and entry.file != self.name
            ordered.append((problem.place.startswith(_COMMAND_LINE), is_in_base, rank.get(known, 0), problem))
        return ExperimentError([problem for *_, problem in sorted(ordered, key=lambda one: one[:3])])


@dataclass(frozen=True)
class Source:
    """Values of a file before overrides are applied and ``${...}`` is resolved."""

    tree: dict[str, Any]
    entries: dict[str, Line | str] = field(default_factory=dict)  # Line of each key
    bases: tuple[Path, ...] = ()  # Files that it extends, the nearest first
    problems: tuple[Problem, ...] = ()  # Values that YAML can't read as they were meant


@dataclass(frozen=True)
class ExperimentFile:
    """A validated experiment with the place of each of its keys."""

    path: Path
    experiment: Experiment
    places: Places
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Values of the file and its overrides, before ``${...}`` is resolved; may hold secrets."""
    bases: tuple[Path, ...] = ()  # Files that it extends, the nearest first

    @property
    def source(self) -> str:
        """Path of the file relative to the working directory; empty if the experiment was written in Python."""
        return os.path.relpath(self.path) if self.path.is_file() else ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that are in force, as they were written."""
        return tuple(dict.fromkeys(entry for entry in self.places.entries.values() if isinstance(entry, str)))

    def vary(self, values: Mapping[str, Any], *overrides: str) -> "ExperimentFile":
        """Return the experiment without its sweep and with other values, by dotted key, and further overrides."""
        tree = deepcopy(dict(self.tree))
        tree.pop("sweep", None)
        read = Source(tree, dict(self.places.entries), self.bases)
        return _check(self.places.name, read, [*(override(key, values[key]) for key in values), *overrides])

    def explain(self, found: Iterable[Problem]) -> ExperimentError:
        """Return an error with the places of all problems, in the order of the file."""
        return self.places.explain(found)


def load(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment file, with ``key=value`` overrides applied before interpolation."""
    return _check(str(path), _read(str(path)), overrides)


def from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentFile:
    """Load an experiment from the contents of a file as dicts, lists, strings and numbers."""
    found = list[Problem]()
    for parts, value in keys.walk(values):
        key = keys.join(parts)
        if isinstance(value, Mapping):
            odd = [name for name in value if not isinstance(name, str)]
            found += [Problem(key, f"the key {name!r} is not a string; put it in quotes", _IN_PYTHON) for name in odd]
        elif not isinstance(value, list | tuple) and type(value) not in _PLAIN:
            message = f"is of type {type(value).__name__}; write strings, numbers, lists and dicts"
            if callable(value) and hasattr(value, "__qualname__"):
                dotted = f'write its dotted name, "{value.__module__}.{value.__qualname__}"'
                message = f"is the object {value.__qualname__}; {dotted}"
            found.append(Problem(key, message, _IN_PYTHON))
    if found:
        raise ExperimentError(found)
    return _check(_IN_PYTHON, _extend(Source(_copy(values)), name=_IN_PYTHON, folder=Path()), overrides)


def override(key: str, value: object) -> str:
    """Return the override that sets a value, e.g. "optimizer.lr=0.1"."""
    return f"{key}={yaml_text.format_value(value)}"


# Checking


def _check(name: str, read: Source, overrides: Sequence[str]) -> ExperimentFile:
    """Validate what was read, with overrides, which are written into it. Raises as `load` does."""
    tree, places = read.tree, Places(name, read.entries)
    rejected = apply_overrides(overrides, tree, read.entries)
    rejected += _refer_to_mlflow_variables(tree)
    if "extends" in tree:
        rejected.append(Problem("extends", "works only in files. Set it in the experiment file."))
    resolved, found = references.resolve(tree)
    try:
        experiment = Experiment.model_validate(resolved, by_alias=True, by_name=False)
        more = list(contradictions(experiment))
    except ValidationError as error:
        more = find_problems(error, Experiment, resolved)
    reported = {problem.key for problem in found}  # what follows from them is no news
    misread = {problem.key for problem in read.problems}
    found += [one for one in more if one.key not in misread and reported.isdisjoint(keys.ancestors(one.key))]
    if found or rejected or read.problems:
        raise places.explain([*read.problems, *found, *rejected])
    file = ExperimentFile(Path(name), experiment, places, tree, read.bases)
    if wrong := sweep.find_problems(experiment.sweep, file.vary):
        raise file.explain(wrong)
    return file


def _refer_to_mlflow_variables(tree: dict[str, Any]) -> Iterator[Problem]:
    """Have ``tracking`` refer to MLflow's variables, as jobs on a cluster also read them; yield what is wrong."""
    section = tree.get("tracking", {})
    for name, variable in (("uri", TRACKING_VARIABLE), ("experiment", "MLFLOW_EXPERIMENT_NAME")):
        value = os.environ.get(variable)
        if not value or not isinstance(section, dict) or name in section:
            continue
        if name == "uri" and (problem := problem_of(value)):
            message = f"not set, so {variable} is used. It is {without_credentials(value)}; {problem}"
            yield Problem("tracking.uri", message)
            continue
        tree["tracking"] = section = {**section, name: f"${{oc.env:{variable}}}"}


def _copy(value: Any) -> Any:
    """Copy a value to plain dicts and lists, as YAML would give it, so that nothing is shared with the caller."""
    if isinstance(value, Mapping):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


# Files


def _read(name: str, *, extending: tuple[Path, ...] = ()) -> Source:
    """Read the file at a path and those that it extends; ``extending`` are resolved paths of files that extend it."""
    path = Path(name)
    tree, lines, problems = yaml_text.parse(_read_text(path), place=lambda line: f"{name}:{line}")
    if problems and not isinstance(tree, dict):
        raise ExperimentError(problems)
    if tree is None:
        raise ExperimentError([Problem("", "is empty. An experiment starts with name: my-experiment", name)])
    if not isinstance(tree, dict):
        message = f"is {describe_value(tree)}; write sections such as model: and data:"
        raise ExperimentError([Problem("", message, name)])
    own = Source(tree, {key: Line(name, number) for key, number in lines.items()}, problems=tuple(problems))
    return _extend(own, name=name, folder=path.parent, extending=(*extending, path.resolve()))


def _extend(own: Source, *, name: str, folder: Path, extending: tuple[Path, ...] = ()) -> Source:
    """Merge a source called ``name`` with the file that it extends, relative to ``folder``."""
    if "extends" not in own.tree:
        return own
    value, place = own.tree["extends"], str(own.entries.get("extends", name))
    if not isinstance(value, str) or not value or "${" in value:
        message = f"is {describe_value(value)}; write the path of a file, relative to this one, such as base.yaml"
        raise ExperimentError([Problem("extends", message, place)])
    path = folder / value
    if path.resolve() in extending:
        files = [os.path.relpath(file) for file in (*extending[extending.index(path.resolve()) :], path)]
        message = f"the files extend each other: {' extends '.join(files)}. Remove one of them."
        raise ExperimentError([Problem("extends", message, place)])
    try:
        base = _read(str(path), extending=extending)
    except UsageError as error:
        raise ExperimentError([Problem("extends", f"is {value}; {error}", place)]) from None
    replaced = {"extends"}
    tree = _merge(base.tree, own.tree, key="", replaced=replaced)
    del tree["extends"]
    kept = {key: line for key, line in base.entries.items() if replaced.isdisjoint(keys.ancestors(key))}
    return Source(tree, {**kept, **own.entries}, (path, *base.bases), (*base.problems, *own.problems))


def _merge(base: Mapping[str, Any], own: Mapping[str, Any], *, key: str, replaced: set[str]) -> dict[str, Any]:
    """Merge two sections at ``key``; add the keys of the base that are replaced as a whole to ``replaced``."""
    result = dict(base)
    for name, value in own.items():
        there, before = keys.child(key, name), base.get(name)
        are_sections = isinstance(value, Mapping) and isinstance(before, Mapping) and "_target_" not in value
        if are_sections and key != ".".join(_SWEPT) and there != _REPLACED:
            result[name] = _merge(base[name], value, key=there, replaced=replaced)
        else:
            result[name] = value
            replaced.add(there)
    return result


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # limited: it may be a checkpoint
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ExperimentError([Problem("", "is larger than 1 MiB, so it is not an experiment file", str(path))])
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file{_suggest(path.parent, meant=path.name)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not an experiment file{_suggest(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        raise ExperimentError([Problem("", message, f"{path}:{line}")]) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read: {getattr(error, 'strerror', error)}") from None


def _suggest(folder: Path, *, meant: str = "") -> str:
    """Suggest the experiment file that was probably meant, or list those of a folder and of its experiments/."""
    there = [*sorted(folder.glob("*.y*ml")), *sorted((folder / _USUAL).glob("*.y*ml"))]
    by_name = {file.name: file for file in reversed(there)}  # of equal names that of the folder itself
    if near := nearest(meant, by_name, cutoff=0.7):
        return f"; did you mean {by_name[near]}?"
    return f"; there are {listed([*map(str, there)], most=5)}" if there else ""


# Overrides


def apply_overrides(overrides: Sequence[str], tree: dict[str, Any], entries: dict[str, Line | str]) -> list[Problem]:
    """Set each override in ``tree``, in place of a whole section, and ``entries``; return problems of others."""
    found = []
    for each in overrides:
        key, equals, text = each.partition("=")
        if equals and key.startswith("-"):
            raise UsageError(f"{each}: not an option. Write {each.lstrip('-')}, without dashes.")
        try:
            parts = keys.split(key)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(f"{each!r} is not an override. Write key=value without spaces, e.g. train.epochs=3.")
        try:
            value = yaml_text.parse(text, place=lambda _: "", depth=len(parts), in_shell=True)[0]
            if len(parts) > 2 and parts[:2] == _SWEPT:  # the name of a parameter keeps its dots, and it has one kind
                *rest, kind = parts[2:]
                if rest and kind in Parameter.model_fields and not isinstance(value, Mapping):
                    key, value = keys.join((*_SWEPT, *rest)), {str(kind): value}
                    parts = (*_SWEPT, *rest)
                parts = (*_SWEPT, keys.join(parts[2:]))
            _set(tree, parts, value)
        except ExperimentError as error:
            for problem in error.problems:
                dot = "." if problem.key and not problem.key.startswith("[") else ""
                found.append(Problem(f"{key}{dot}{problem.key}", problem.message, _format_override(each)))
            continue
        normal = list(keys.ancestors(key))[1]
        for known in [known for known in entries if known.startswith((f"{normal}.", f"{normal}["))]:
            del entries[known]
        entries[normal] = each
        for section in list(keys.ancestors(normal))[1:]:
            entries.setdefault(section, each)
    return found


def _set(tree: dict[str, Any], parts: tuple[keys.Part, ...], value: object) -> None:
    """Set the value; create the sections on the way that the file lacks."""
    section: Any = tree
    for n, part in enumerate(parts):
        is_last, at = n == len(parts) - 1, str(part)
        if isinstance(section, list):
            if not at.isdecimal() or int(at) >= len(section):
                has = f"It has {len(section)} entries, counted from 0."
                raise ExperimentError.of("", f"{keys.join(parts[:n])} has no entry {part}. {has}")
        elif not isinstance(section, dict):
            where = f"{keys.join(parts[:n])} is {describe_value(section)}"
            raise ExperimentError.of("", f"{where}. Keys inside it cannot be set.")
        elif section.get(at) is None and not is_last:
            section[at] = {}
        index: Any = int(at) if isinstance(section, list) else at
        if is_last:
            section[index] = value
        else:
            section = section[index]


def _format_override(text: str) -> str:
    """Return the place of a problem that an override caused."""
    text = without_credentials_in(text)
    return f"{_COMMAND_LINE}{text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'}"


def read_variants(
    files: Sequence[str], overrides: Sequence[str], *, vary: str | None
) -> list[tuple[str, ExperimentFile]]:
    """Read the variants of a comparison, each with its description: files, or one file with the values of ``vary``."""
    if vary is not None:
        if len(files) != 1:
            raise UsageError(f"--vary varies one experiment file, and {len(files)} are named")
        each, shared = parse_vary(vary)
        return [(", ".join(own), load(files[0], [*overrides, *own, *shared])) for own in each]
    if len(files) == 1:
        raise UsageError(
            f"compare takes at least two experiment files, or --vary, e.g. --vary optimizer.lr=0.1,0.05. "
            f"Did you mean: pipeline benchmark {files[0]}"
        )
    if repeated := next((file for file in files if files.count(file) > 1), ""):
        raise UsageError(f"{repeated} is named twice")
    return [(file, load(file, overrides)) for file in files]


def parse_vary(text: str) -> tuple[list[list[str]], list[str]]:
    """Return the overrides of each variant, and those that all share, e.g. of "optimizer.lr=0.1,0.05 seed=7"."""
    values: dict[str, list[str]] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--vary {text}: {error}".rstrip(".")) from None
    for word in words:
        key, equals, listed = word.partition("=")
        found = _split(listed)
        if not equals or not all(map(str.strip, found)):
            raise UsageError(f"--vary {word}: write key=value,value, e.g. --vary optimizer.lr=0.1,0.05")
        if key in values:
            raise UsageError(f"--vary: {key} is named twice. List its values, e.g. {key}=0.1,0.05")
        values[key] = found
    counts = {len(found) for found in values.values() if len(found) > 1}
    if len(counts) != 1:
        given = ", ".join(f"{key} has {counted(len(found), 'value')}" for key, found in values.items()) or "no key"
        example = '--vary "optimizer.lr=0.1,0.05 train.ema=null,0.99"'
        raise UsageError(f"--vary: {given}. Give each key the same number of values, or one, e.g. {example}")
    shared = [f"{key}={found[0]}" for key, found in values.items() if len(found) == 1]
    varied = [[f"{key}={value}" for value in found] for key, found in values.items() if len(found) > 1]
    return [list(own) for own in zip(*varied, strict=True)], shared


def _split(text: str) -> list[str]:
    """Split a list of values at its commas, but not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def flatten(experiment: Experiment) -> dict[str, str]:
    """Return dotted keys with their values as strings, e.g. {"train.epochs": "3"}; a list of plain values is one."""
    flat: dict[str, str] = {}
    _flatten(_shown(experiment), "", flat)
    return flat


def config_hash(experiment: Experiment) -> str:
    """Return 12 hexadecimal digits (SHA-256) that are equal for equal experiments, however their files are written."""
    canonical = json.dumps(_shown(experiment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def to_yaml(experiment: Experiment) -> str:
    """Return the experiment with all defaults as YAML; loading it gives the same experiment."""
    plain = experiment.model_dump(mode="json")
    if experiment.train.batch_size_per_worker is not None:
        del plain["train"]["global_batch_size"]  # that follows from it
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _shown(experiment: Experiment) -> dict[str, object]:
    return references.fill_in(experiment, mode="show").model_dump(mode="json")


def _flatten(value: object, key: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(inner, keys.child(key, name), into)
    elif isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        for index, inner in enumerate(value):
            _flatten(inner, keys.child(key, index), into)
    else:
        into[key] = value if isinstance(value, str) else json.dumps(value)
