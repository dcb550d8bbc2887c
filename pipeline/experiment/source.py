"""Source of an experiment: a YAML file merged with the files that it extends, and the origin of each key.

The keys of a file win over those of the file that it extends. Sections are merged key by key. Lists, plain values,
sweep parameters and components with a ``_target_`` of their own are replaced as a whole.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.experiment import keys, lines
from pipeline.experiment.lines import Line
from pipeline.experiment.messages import shown
from pipeline.wording import nearest

EXTENDS = "extends"
_USUAL = "experiments"
"""Folder of a project that has its experiments."""
_MOST_NAMED = 5
_MOST_BYTES = 2**20
_REPLACED_IN = "sweep.parameters"
_REPLACED = "benchmark.baseline"
"""A section that is a single choice, not several settings."""


@dataclass(frozen=True)
class Source:
    """Values of a file before overrides are applied and ``${...}`` is resolved."""

    tree: dict[str, Any]
    entries: dict[str, Line | str] = field(default_factory=dict)
    """Line of each key."""
    bases: tuple[Path, ...] = ()
    """Files that it extends, the nearest first."""


def read(name: str, *, extending: tuple[Path, ...] = ()) -> Source:
    """Read the file at a path and those that it extends; ``extending`` are resolved paths of files that extend it.

    Raises:
        UsageError: the file can't be read.
        ExperimentError: one of the files isn't YAML, or the file that one extends can't be read or extends it again.
    """
    path = Path(name)
    tree, numbers = _parse(read_text(path), name)
    own = Source(tree, {key: Line(name, number) for key, number in numbers.items()})
    return extended(own, name=name, folder=path.parent, extending=(*extending, path.resolve()))


def extended(own: Source, *, name: str, folder: Path, extending: tuple[Path, ...] = ()) -> Source:
    """Merge a source called ``name`` with the file that it extends, relative to ``folder``; raise as `read`."""
    if EXTENDS not in own.tree:
        return own
    place = str(own.entries.get(EXTENDS, name))
    path = _base(own.tree[EXTENDS], folder=folder, place=place)
    if path.resolve() in extending:
        files = [os.path.relpath(file) for file in (*extending[extending.index(path.resolve()) :], path)]
        raise ExperimentError(
            [Problem(EXTENDS, f"the files extend each other: {' extends '.join(files)}. Remove one of them.", place)]
        )
    try:
        base = read(str(path), extending=extending)
    except UsageError as error:
        raise ExperimentError([Problem(EXTENDS, f"is {own.tree[EXTENDS]}; {error}", place)]) from None
    replaced: set[str] = {EXTENDS}
    tree = _merged(base.tree, own.tree, key="", replaced=replaced)
    del tree[EXTENDS]
    kept = {key: line for key, line in base.entries.items() if replaced.isdisjoint(keys.ancestors(key))}
    return Source(tree, {**kept, **own.entries}, (path, *base.bases))


def _base(value: object, *, folder: Path, place: str) -> Path:
    if not isinstance(value, str) or not value or "${" in value:
        message = f"is {shown(value)}; write the path of a file, relative to this one, such as base.yaml"
        raise ExperimentError([Problem(EXTENDS, message, place)])
    return folder / value


def _merged(base: Mapping[str, Any], own: Mapping[str, Any], *, key: str, replaced: set[str]) -> dict[str, Any]:
    """Merge two sections at ``key``; add the keys of the base that are replaced as a whole to ``replaced``."""
    result = dict(base)
    for name, value in own.items():
        there, before = keys.child(key, name), base.get(name)
        are_sections = isinstance(value, Mapping) and isinstance(before, Mapping) and "_target_" not in value
        if are_sections and key != _REPLACED_IN and there != _REPLACED:
            result[name] = _merged(base[name], value, key=there, replaced=replaced)
        else:
            result[name] = value
            replaced.add(there)
    return result


def _parse(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    tree, file_lines = lines.parse(text, place=lambda line: f"{name}:{line}")
    if tree is None:
        raise ExperimentError([Problem("", "is empty. An experiment starts with name: my-experiment", name)])
    if not isinstance(tree, dict):
        raise ExperimentError([Problem("", f"is {shown(tree)}; write sections such as model: and data:", name)])
    return tree, file_lines


def read_text(path: Path) -> str:
    """Read the text of an experiment file; raise as `read`."""
    try:
        with path.open("rb") as file:  # limited: it may be a device or a checkpoint
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            message = f"is larger than {_MOST_BYTES // 2**20} MiB. Experiment files cannot be larger."
            raise ExperimentError([Problem("", message, str(path))])
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file{_others(path.parent, meant=path.name)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not an experiment file{_others(path)}") from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ExperimentError([Problem("", message, f"{path}:{line}")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: can't be read: {reason}") from None


def _others(folder: Path, *, meant: str = "") -> str:
    """Suggest the experiment file that was probably meant, or list those of a folder and of its experiments/."""
    if not folder.is_dir():
        return f"; the folder {folder} does not exist"
    there = [*sorted(folder.glob("*.y*ml")), *sorted((folder / _USUAL).glob("*.y*ml"))]
    by_name = {file.name: file for file in reversed(there)}  # of equal names that of the folder itself
    if near := nearest(meant, by_name, cutoff=0.7):
        return f"; did you mean {by_name[near]}?"
    if not there:
        return f"; there is no YAML file in {folder}"
    more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return f"; there are {', '.join(map(str, there[:_MOST_NAMED]))}{more}"
