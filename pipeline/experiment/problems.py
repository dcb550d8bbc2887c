"""Error messages from pydantic's errors: the value in the file, and the allowed values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.errors import MOST_PROBLEMS, Problem
from pipeline.experiment import jsonschema, keys
from pipeline.experiment.jsonschema import Schema
from pipeline.experiment.keys import Part
from pipeline.experiment.schema import Experiment
from pipeline.experiment.uris import without_credentials
from pipeline.experiment.yaml_text import Loader
from pipeline.wording import did_you_mean, nearest

_LONGEST = 60
_OF_OPTIMIZERS = ("lr", "momentum", "weight_decay", "betas")
_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {
    "exclusiveMinimum": "greater than",
    "exclusiveMaximum": "less than",
    "minimum": "of at least",
    "maximum": "of at most",
}


def find_problems(error: ValidationError, model: type[BaseModel], data: object) -> list[Problem]:
    """Return one problem for each key in ``data`` that ``model`` rejects, up to the number that is shown."""
    found: dict[str, Problem] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # pydantic also calls a list with invalid entries too short
        parts, inside = list[Part](), data
        for part in details["loc"]:  # without the choices of a union, which pydantic appends
            if isinstance(inside, Mapping) and (part in inside or details["type"] == "missing"):
                inside = inside.get(part)
            elif isinstance(inside, Sequence) and not isinstance(inside, str) and isinstance(part, int):
                inside = inside[part]
            else:
                break
            parts.append(part)
        key = keys.join(parts)
        if key not in found and len(found) <= MOST_PROBLEMS:  # a union reports an error for each choice
            found[key] = Problem(key, _explain(details, parts, model))
    return list(found.values())


def describe_value(value: object) -> str:
    """Describe a YAML value with its type for a message, e.g. "'abc' (a string)"."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str | int | float):
        return f"{shorten(value)} ({_KINDS[type(value)]})"
    return "a mapping" if isinstance(value, Mapping) else "a list"


def shorten(value: object) -> str:
    """Return the repr of a value without credentials, cut to a readable length."""
    text = repr(without_credentials(value) if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def hint_at_quotes(text: str) -> str:
    """Return a hint if a number came as a string, from quotes or from an environment variable."""
    try:
        number: Any = yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError):
        return ""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return ", without quotes (from the environment: ${oc.decode:${oc.env:NAME}})" if is_number else ""


def _explain(details: ErrorDetails, parts: Sequence[Part], model: type[BaseModel]) -> str:
    value, schema = details["input"], jsonschema.at(parts, model)
    # The first sentence of the description, in lower case to follow a semicolon.
    text = " ".join(re.split(r"\.\s+(?=[A-Z])", str(schema.get("description", "a value")))[0].removesuffix(".").split())
    described = text if text[1:2].isupper() or text.startswith("MLflow") else text[:1].lower() + text[1:]
    match details["type"]:
        case "extra_forbidden":
            return _explain_unknown(parts, model)
        case "missing" if parts[-1] == "_target_":
            near = nearest("_target_", value if isinstance(value, Mapping) else ())
            return f"missing; write _target_: package.name{f' instead of {near}' if near else ''}"
        case "missing":
            return f"missing; {described}"
        case "string_pattern_mismatch" if parts[-1] != "_target_":
            return f"is {describe_value(value)}; write {described}"
        case "string_too_long":
            return f"is {len(value)} characters long; write at most {details['ctx']['max_length']}"
        case "too_short":
            return "is an empty list. Add an entry, or remove the key."
        case "value_error" if "enum" not in schema:
            return f"is {describe_value(value)}; {details['ctx']['error']}"
    if jsonschema.is_component(schema) or parts[-1:] == ["_target_"]:
        is_dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
        return f"is {describe_value(value)}; write _target_: {value if is_dotted else 'package.name'}"
    if fields := jsonschema.fields(parts, model):
        return f"is {describe_value(value)}; write a mapping with keys from {', '.join(fields)}"
    hint = did_you_mean(value, schema.get("enum", ()), cutoff=0.7) if isinstance(value, str) else ""
    kinds = {choice.get("type") for choice in (schema, *schema.get("anyOf", ()))}
    if isinstance(value, str) and not hint and not kinds.isdisjoint(("integer", "number")):
        hint = hint_at_quotes(value)
    return f"is {describe_value(value)}; write {_describe_allowed(schema)}{hint}"


def _explain_unknown(parts: Sequence[Part], model: type[BaseModel]) -> str:
    """Name the key that was probably meant: one of the same section, or of another one."""
    *section, name = parts
    fields = jsonschema.fields(section, model)
    meant = nearest(str(name), fields)
    if not meant and model is Experiment:
        known = {key.rpartition(".")[2]: key for key in reversed([*jsonschema.all_keys()])}
        known |= {argument: f"optimizer.{argument}" for argument in _OF_OPTIMIZERS}
        meant = known.get(nearest(str(name), known, cutoff=0.8) or "")
    if meant:
        return f"unknown key; did you mean {meant}?"
    return f"unknown key; {keys.join(section) or 'an experiment'} takes {', '.join(fields)}"


def _describe_allowed(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "const" in schema:
        return str(schema["const"])
    bounds = [f"{words} {schema[name]}" for name, words in _BOUNDS.items() if name in schema]
    return " ".join([_NOUNS.get(schema.get("type", ""), "something else"), " and ".join(bounds)]).rstrip()
