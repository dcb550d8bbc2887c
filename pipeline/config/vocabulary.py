"""Shell completion of the experiment file's keys and values, without importing any component."""

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipeline.config import keys, source
from pipeline.config.jsonschema import SUGGESTED, Shape
from pipeline.config.schema import Experiment
from pipeline.config.targets import BUILT_IN, allowed_packages
from pipeline.errors import PipelineError

_TARGET = "_target_"
_MOST_MODULES = 200  # files of one package that are searched for names


def all_keys(file: Path | None = None) -> list[str]:
    """Return the dotted keys of all values in the schema, and in a file, whose components have arguments."""
    shape = Shape.of(Experiment)
    described = (keys.child(key, _TARGET) if shape.is_component(keys.split(key)) else key for key in shape.all_keys())
    known = dict.fromkeys([*described, *_keys_of(file)])
    sections = {key for inner in known for key in list(keys.ancestors(inner))[2:]}  # the first two are the key itself
    return [key for key in known if key not in sections]


def values_of(key: str) -> list[str]:
    """Return the values of a key if they can be listed: those of the schema, or known components."""
    try:
        parts = keys.split(key)
    except ValueError:
        return []
    if parts[-1] == _TARGET:
        return [*SUGGESTED.get(str(parts[0]), ()), *_own_names()]
    return list(dict.fromkeys(_values(Shape.of(Experiment).at(parts))))


def _values(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from map(str, [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])])
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for choice in schema.get("anyOf", ()):
        yield from _values(choice)


def _keys_of(file: Path | None) -> list[str]:
    try:
        return list(_leaves(source.read(str(file)).tree, "")) if file is not None else []
    except PipelineError:
        return []


def _leaves(value: object, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, keys.child(key, str(name)))
    elif key:
        yield key


def _own_names() -> Iterator[str]:
    """Yield public classes and functions of the project's packages; parses files, since imports may take seconds."""
    try:
        packages = allowed_packages()[len(BUILT_IN) :]
    except PipelineError:
        return
    for package in packages:
        for module, path in _modules(package):
            yield from (f"{module}.{name}" for name in _defined(path))


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a package with their files, found as an import would."""
    path: list[str] | None = [str(Path.cwd()), str(Path.cwd() / "src"), *sys.path]
    root, *rest = package.split(".")
    spec = PathFinder.find_spec(root, path)
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        yield from [(root, Path(spec.origin))] if spec.origin else []
        return
    for location in spec.submodule_search_locations:
        folder = Path(location, *rest)
        for file in sorted(folder.rglob("*.py"))[:_MOST_MODULES]:
            names = file.relative_to(folder).with_suffix("").parts
            yield ".".join([root, *rest, *(name for name in names if name != "__init__")]), file


def _defined(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
