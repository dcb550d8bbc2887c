"""Writer of docs/keys.md from the schema, to standard output; make schema calls it.

The page is committed, so that reviews show the change of a key. A test holds that it is up to date.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from pipeline import registry
from pipeline.experiment.jsonschema import SUGGESTED, at, fields, follow, is_component, schema_of
from pipeline.experiment.schema import Experiment

BEGIN = """# Experiment file reference (YAML)

This page lists every key of an experiment file. The shortest complete file:

```yaml
name: mlp-digits
model: {_target_: pipeline.models.MLP, in_features: 64, hidden: [64, 64], num_classes: 10}
data: {_target_: pipeline.data.digits}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {epochs: 5, global_batch_size: 64}
```

- A **component** is `{_target_: package.name, argument: value, ...}`: the dotted name of a class or function, and its
  arguments. Components may be nested. `pyproject.toml` lists your packages: `packages = ["mypackage"]` below
  `[tool.pipeline]`. Of other libraries, only models, losses, optimizers and similar classes are allowed.
- A **string** may refer to another key (`${train.epochs}`) or to an environment variable (`${oc.env:NAME,default}`).
  In a component it may refer to `${total_steps}`, `${steps_per_epoch}` and `${world_size}`. There the value of a
  variable is a text; `${oc.decode:${oc.env:WIDTH,16}}` is a number.
- The **command line** sets any key by its dotted name: `pipeline run FILE train.lr_scaling.rule=linear`.
- An **unknown key** is an error that names the most similar known key. `pipeline check FILE` checks a file.

`make schema` writes this page from the types that validate a file.

## `extends`

A file that differs from another in a few keys names the other file, and has only these keys:

```yaml title="experiments/wide.yaml"
extends: mlp.yaml               # relative to this file
name: mlp-wide
model: {hidden: [256, 256]}     # the other arguments of the model stay
scheduler:
  _target_: torch.optim.lr_scheduler.CosineAnnealingLR
  T_max: ${total_steps}
train: {epochs: 2}
```

<!-- test: run -->
```bash
pipeline run experiments/wide.yaml --dry-run
```

- The keys of the file override the keys of the extended file. Sections are merged key by key.
- Lists, plain values, the parameters of a `sweep`, `benchmark.baseline`, and components with a `_target_`
  are replaced as a whole.
  `optimizer: {lr: 0.2}` changes the learning rate only. `scheduler: null` removes a component.
- The extended file may extend another file. It need not be a complete experiment.
- References and values from the command line apply to the merged experiment.
- The run stores the merged experiment as `experiment.yaml`. It doesn't depend on the extended file later.
- In Python, a dict may have the key `extends`. Its path is relative to the working directory.
"""
_ANY = "KEY"
"""Placeholder for the user's own names in a mapping."""
_GROUPS = ("optimizer", "groups", 0)
HEAD = "| key | value | default | |\n|---|---|---|---|"


def page() -> Iterator[str]:
    """Yield the page in pieces."""
    yield BEGIN
    yield "## At the top\n"
    yield from _keys(())
    yield from _options()


def _section(path: tuple[Any, ...]) -> Iterator[str]:
    yield f"\n## `{'.'.join(part for part in path if part != 0)}`\n"
    yield _text(at(path)) + "\n"
    yield from _keys(path)


def _keys(path: tuple[Any, ...]) -> Iterator[str]:
    """Yield the keys with values as a table, then the sections."""
    names = fields(path)
    yield from _table(Experiment, path, [name for name in names if not _is_only_section((*path, name))])
    for inner in ((*path, name, *entry) for name in names for entry in ((), (0,), (_ANY,))):
        if _is_section(inner):
            yield from _section(inner)
        elif inner == _GROUPS[:1]:  # the only component with a section
            yield from _section(_GROUPS)


def _options() -> Iterator[str]:
    for name in registry.names("strategies"):
        options = registry.load("strategies", name).Strategy.Options
        if fields((), options):
            yield f"\n## `parallel.options` of {name}\n"
            yield from _table(options, (), list(fields((), options)))
    yield "\nThe other strategies have no options. [Your own strategy](extend.md) may have options."


def _table(model: type[BaseModel], path: tuple[Any, ...], names: list[str]) -> Iterator[str]:
    section, root = at(path, model), schema_of(model)
    yield HEAD
    for name in names:
        own = section["properties"][name]
        default = "required" if name in section.get("required", ()) else _default(own)
        yield f"| `{name}` | {_value(root, own, path, name)} | {default} | {_text(at((*path, name), model))} |"


def _value(root: Mapping[str, Any], schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    """Return the allowed values of a key in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(root, each, path, name) for each in _choices(schema)))
    if "$ref" in schema:
        return _referred(root, schema, path, name)
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return _plain(root, schema, path, name)


def _plain(root: Mapping[str, Any], schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    match schema.get("type"):
        case "array":
            return f"list of: {_value(root, schema['items'], path, name)}"
        case "object":
            inner = schema.get("additionalProperties")
            return (
                f"names with: {_value(root, inner, (*path, name), _ANY)}"
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


def _referred(root: Mapping[str, Any], schema: Mapping[str, Any], path: tuple[Any, ...], name: str) -> str:
    if not is_component(follow(schema, root)):
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


def _is_section(path: tuple[Any, ...]) -> bool:
    return bool(fields(path)) and not is_component(at(path))


def _is_only_section(path: tuple[Any, ...]) -> bool:
    """Tell if the key takes a section only, not also ``true`` or ``false``."""
    return _is_section(path) and "anyOf" not in at(path)


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
