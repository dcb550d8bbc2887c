"""Writer of docs/keys.md from the schema, to standard output; make schema calls it.

The page is committed, so that reviews show the change of a key. A test holds that it is up to date.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import registry
from pipeline.config.jsonschema import SUGGESTED, Shape, describes_component
from pipeline.config.schema import Experiment

BEGIN = """# Every key of an experiment

`make schema` writes this page from the types that validate your file and complete keys in your editor. An unknown key
is an error that names the nearest known key. Any value can be overridden on the command line by its dotted key, such as
`train.lr_scaling.rule=linear`.

A **component** is `{_target_: package.name, argument: value, ...}`: a class or function by its dotted name, called with
these arguments ([allowed packages](decisions/0004-targets.md)). Components may be nested. Strings may refer to other
keys (`${train.epochs}`), to environment variables (`${oc.env:NAME,default}`) and, inside components, to the run-time
values `${total_steps}`, `${steps_per_epoch}` and `${world_size}` ([why](decisions/0005-run-time-values.md)).
"""
_ANY = "KEY"
"""Placeholder for the user's own names in a mapping."""
_GROUPS = ("optimizer", "groups", 0)
HEAD = "| key | value | default | |\n|---|---|---|---|"


def page() -> Iterator[str]:
    """Yield the page in pieces."""
    yield BEGIN
    shape = Shape.of(Experiment)
    yield "## At the top\n"
    yield from _keys(shape, ())
    yield from _options()


def _section(shape: Shape, path: tuple[Any, ...]) -> Iterator[str]:
    yield f"\n## `{'.'.join(part for part in path if part != 0)}`\n"
    yield _text(shape.at(path)) + "\n"
    yield from _keys(shape, path)


def _keys(shape: Shape, path: tuple[Any, ...]) -> Iterator[str]:
    """Yield the keys with values as a table, then the sections."""
    names = shape.fields(path)
    yield from _table(shape, path, [name for name in names if not _is_only_section(shape, (*path, name))])
    for inner in ((*path, name, *entry) for name in names for entry in ((), (0,), (_ANY,))):
        if _is_section(shape, inner):
            yield from _section(shape, inner)
        elif inner == _GROUPS[:1]:  # the only component with a section
            yield from _section(shape, _GROUPS)


def _options() -> Iterator[str]:
    for name in registry.names("strategies"):
        shape = Shape.of(registry.load("strategies", name).Strategy.Options)
        if shape.fields(()):
            yield f"\n## `parallel.options` of {name}\n"
            yield from _table(shape, (), list(shape.fields(())))
    yield "\nThe other strategies take no options. Yours may: see [Extend](extend.md)."


def _table(shape: Shape, path: tuple[Any, ...], names: list[str]) -> Iterator[str]:
    section = shape.at(path)
    yield HEAD
    for name in names:
        own = section["properties"][name]
        default = "required" if name in section.get("required", ()) else _default(own)
        yield f"| `{name}` | {_value(shape, own, path, name)} | {default} | {_text(shape.at((*path, name)))} |"


def _value(shape: Shape, schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    """Return the allowed values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(shape, each, path, name) for each in _choices(schema)))
    if "$ref" in schema:
        return _referred(shape, schema, path, name)
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return _plain(shape, schema, path, name)


def _plain(shape: Shape, schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    match schema.get("type"):
        case "array":
            return f"list of: {_value(shape, schema['items'], path, name)}"
        case "object":
            inner = schema.get("additionalProperties")
            return (
                f"names with: {_value(shape, inner, (*path, name), _ANY)}"
                if isinstance(inner, Mapping) and inner
                else "mapping"
            )
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return f"{kind}{_limits(schema)}"
        case "string":
            return "string"
    return "any value"


def _referred(shape: Shape, schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    if not describes_component(shape.follow(schema)):
        return f"[section](#{''.join([*map(str, path), name]).lower()})"  # as mkdocs names a heading
    examples = SUGGESTED.get(name, ()) if not path else ()
    return f"component, e.g. `{examples[0]}`" if examples else "component"


def _choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [choice for choice in schema["anyOf"] if choice.get("type") != "null"]


def _limits(schema: Mapping[str, Any]) -> str:
    words = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    said = [f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema]
    return f" {', '.join(said)}" if said else ""


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    if default is None or default in ({}, []):
        return ""
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def _text(schema: Mapping[str, Any]) -> str:
    """Return a description on one line, escaped for a table."""
    return " ".join(schema.get("description", "").split()).replace("``", "`").replace("|", "\\|").replace("*", "\\*")


def _is_section(shape: Shape, path: tuple[Any, ...]) -> bool:
    return bool(shape.fields(path)) and not shape.is_component(path)


def _is_only_section(shape: Shape, path: tuple[Any, ...]) -> bool:
    """Tell if the key takes a section only, not also ``true`` or ``false``."""
    return _is_section(shape, path) and "anyOf" not in shape.at(path)


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
