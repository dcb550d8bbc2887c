"""Writer of docs/keys.md from the schema, to standard output; make schema calls it.

The page is committed, so that reviews show the change of a key. A test holds that it is up to date.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from pipeline import registry
from pipeline.experiment.problems import SUGGESTED, fields_at, follow, is_component, schema_at, schema_of
from pipeline.experiment.schema import Experiment

BEGIN = """# Experiment file reference (YAML)

This page lists every key of an experiment file. [A first file](index.md#run-an-experiment) shows the most common ones.
A key inside another one is written with a dot, as on the command line.

- A **component** is `{_target_: package.name, argument: value, ...}`: the dotted name of a class or function, and its
  arguments. Components may be nested. [Your own packages](model-and-data.md) must be listed in `pyproject.toml`. Of
  other libraries, only models, losses, optimizers and similar classes are allowed.
- A **string** may refer to another key (`${train.epochs}`) or to an environment variable (`${oc.env:NAME,default}`).
  In a component it may refer to `${total_steps}`, `${steps_per_epoch}` and `${world_size}`. There the value of a
  variable is a text; `${oc.decode:${oc.env:WIDTH,16}}` is a number.
- The **command line** sets any key by its dotted name: `pipeline run FILE train.lr_scaling.rule=linear`.

## `extends`

A file that differs from another in a few keys names the other file, and has only these keys:

```yaml title="experiments/wide.yaml"
extends: mlp.yaml               # relative to this file
name: mlp-wide
model: {hidden: [256, 256]}     # the other arguments of the model stay
train: {epochs: 2}
```

<!-- test: run -->
```bash
pipeline run experiments/wide.yaml --dry-run
```

Sections and the arguments of components are merged key by key. Lists, plain values, the parameters of a `sweep`,
`benchmark.baseline`, and components with a `_target_` are replaced as a whole. `scheduler: null` removes a component.
The extended file may extend another file, and need not be a complete experiment. References and values from the command
line apply to the merged experiment, which the run stores as `experiment.yaml`.
"""
_ANY = "KEY"
"""Placeholder for the user's own names in a mapping."""
_GROUPS = ("optimizer", "groups", 0)
HEAD = "| key | value | default | |\n|---|---|---|---|"


def page() -> Iterator[str]:
    """Yield the page in pieces."""
    yield BEGIN
    sections = [name for name in fields_at(()) if _is_section((name,))]
    yield "## At the top\n"
    yield from _table([(name,) for name in fields_at(()) if name not in sections])
    for name in sections:
        yield f"\n## `{name}`\n"
        yield _text(schema_at((name,))) + "\n"
        yield from _table([(name, key) for key in fields_at((name,))], below=name)
    yield from _options()


def _options() -> Iterator[str]:
    yield "\n## `parallel.options`\n"
    yield HEAD
    for name in registry.names("strategies"):
        options = registry.load("strategies", name).Strategy.Options
        for key in fields_at((), options):
            yield from _rows(options, (key,), mark=f"{name}: ")
    yield "\nThe other strategies have no options. [Your own strategy](extend.md) may have options."


def _table(paths: list[tuple[Any, ...]], *, below: str = "") -> Iterator[str]:
    yield HEAD
    for path in paths:
        yield from _rows(Experiment, path, below)


def _rows(model: type[BaseModel], path: tuple[Any, ...], below: str = "", *, mark: str = "") -> Iterator[str]:
    """Yield the row of a key, named from the section `below` on, and the rows of the keys inside it."""
    *around, name = path
    section, key = schema_at(around, model), ".".join(part for part in path if part != 0)
    own = section["properties"][name]
    default = "required" if name in section.get("required", ()) else _default(own)
    value = _value(schema_of(model), own, key)
    yield f"| {mark}`{key.removeprefix(f'{below}.')}` | {value} | {default} | {_text(schema_at(path, model))} |"
    for inner in ((*path, *entry) for entry in ((), (0,), (_ANY,))):
        if model is Experiment and _is_section(inner):
            for each in fields_at(inner):
                yield from _rows(model, (*inner, each), below)
        elif inner == _GROUPS[:1]:  # the only component with a section
            yield from _rows(model, _GROUPS[:2], below)


def _value(root: Mapping[str, Any], schema: Mapping[str, Any], key: str) -> str:
    """Return the allowed values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(root, each, key) for each in _choices(schema)))
    if "$ref" in schema:
        return _referred(root, schema, key)
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return _plain(root, schema, key)


def _plain(root: Mapping[str, Any], schema: Mapping[str, Any], key: str) -> str:
    match schema.get("type"):
        case "array":
            return f"list of: {_value(root, schema['items'], key)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"names with: {_value(root, inner, key)}" if isinstance(inner, Mapping) and inner else "mapping"
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return f"{kind}{_limits(schema)}"
        case "string":
            return "string"
    return "any value"


def _referred(root: Mapping[str, Any], schema: Mapping[str, Any], key: str) -> str:
    if not is_component(follow(schema, root)):
        return "section"
    examples = SUGGESTED.get(key, ())
    return f"component, e.g. `{examples[0]}`" if examples else "component"


def _choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [choice for choice in schema["anyOf"] if choice.get("type") != "null"]


def _limits(schema: Mapping[str, Any]) -> str:
    words = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    said = [f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema]
    return f" {', '.join(said)}" if said else ""


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    if default is None or default == [] or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def _text(schema: Mapping[str, Any]) -> str:
    """Return a description on one line, escaped for a table."""
    return " ".join(schema.get("description", "").split()).replace("``", "`").replace("|", "\\|").replace("*", "\\*")


def _is_section(path: tuple[Any, ...]) -> bool:
    return bool(fields_at(path)) and not is_component(schema_at(path))


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
