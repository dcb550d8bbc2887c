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
"""Arguments that most optimizers take, whether a file names them or not."""
_NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
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
        parts = _parts(details, data)
        key = keys.join(parts)
        if key not in found and len(found) <= MOST_PROBLEMS:  # a union reports an error for each choice
            found[key] = Problem(key, _sentence(details, parts, model, data))
    return list(found.values())


def shown(value: object) -> str:
    """Return a YAML value with its type for a message, e.g. "'abc' (a string)"."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str | int | float):
        return f"{cut(value)} ({_KINDS[type(value)]})"
    return "a mapping" if isinstance(value, Mapping) else "a list"


def cut(value: object) -> str:
    """Return the repr of a value without credentials, cut to a readable length."""
    text = repr(without_credentials(value) if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _parts(details: ErrorDetails, data: object) -> tuple[Part, ...]:
    """Return the path of an error without the choices of a union, which pydantic appends."""
    parts: list[Part] = []
    for part in details["loc"]:
        if isinstance(data, Mapping) and (part in data or details["type"] == "missing"):
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(part, int):
            data = data[part]
        else:
            break
        parts.append(part)
    return tuple(parts)


def _sentence(details: ErrorDetails, parts: tuple[Part, ...], model: type[BaseModel], data: object) -> str:
    value, schema = details["input"], jsonschema.at(parts, model)
    match details["type"]:
        case "extra_forbidden":
            return _unknown(parts, model, data)
        case "missing" if parts[-1] == "_target_":
            near = nearest("_target_", value if isinstance(value, Mapping) else ())
            return f"missing; write _target_: package.name{f' instead of {near}' if near else ''}"
        case "missing":
            return f"missing; {_describe(schema)}"
        case "string_pattern_mismatch" if parts[-1] != "_target_":
            return f"is {shown(value)}; write {_describe(schema)}"
        case "string_too_long":
            return f"is {len(value)} characters long; write at most {details['ctx']['max_length']}"
        case "too_short":
            return "is an empty list. Add an entry, or remove the key."
        case "value_error" if "enum" not in schema:
            return f"is {shown(value)}; {details['ctx']['error']}"
    if jsonschema.is_component(schema) or parts[-1:] == ("_target_",):
        is_dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
        return f"is {shown(value)}; write _target_: {value if is_dotted else 'package.name'}"
    if fields := jsonschema.fields(parts, model):
        return f"is {shown(value)}; write a mapping with keys from {', '.join(fields)}"
    hint = did_you_mean(value, schema.get("enum", ()), cutoff=0.7) if isinstance(value, str) else ""
    kinds = {choice.get("type") for choice in (schema, *schema.get("anyOf", ()))}
    if isinstance(value, str) and not hint and not kinds.isdisjoint(("integer", "number")):
        hint = hint_at_quotes(value)
    return f"is {shown(value)}; write {_expected(schema)}{hint}"


def _unknown(parts: tuple[Part, ...], model: type[BaseModel], data: object) -> str:
    """Name the key that was probably meant: an argument of the same name, a key beside it, one of another section."""
    *section, name = parts
    fields = jsonschema.fields(section, model)
    meant: str | None = None
    if model is Experiment:
        inside = (path for path, _ in keys.walk(data) if path and path[-1] == name and jsonschema.is_argument(path))
        meant = next(map(keys.join, inside), None)
    meant = meant or nearest(str(name), fields)
    if not meant and model is Experiment:
        known = {key.rpartition(".")[2]: key for key in reversed([*jsonschema.all_keys()])}
        known |= {argument: f"optimizer.{argument}" for argument in _OF_OPTIMIZERS if argument == name}
        meant = known.get(nearest(str(name), known, cutoff=0.8) or "")
    if meant:
        return f"unknown key; did you mean {meant}?"
    return f"unknown key; {keys.join(section) or 'an experiment'} takes {', '.join(fields)}"


def _expected(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_expected(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "const" in schema:
        return str(schema["const"])
    bounds = [f"{words} {schema[name]}" for name, words in _BOUNDS.items() if name in schema]
    return " ".join([_NOUNS.get(schema.get("type", ""), "something else"), " and ".join(bounds)]).rstrip()


def hint_at_quotes(text: str) -> str:
    """Return a hint if a number came as a string, from quotes or from an environment variable."""
    try:
        number: Any = yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError):
        return ""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return ", without quotes (from the environment: ${oc.decode:${oc.env:NAME}})" if is_number else ""


def _describe(schema: Schema) -> str:
    """Return the first sentence of a field's description, in lower case to follow a semicolon."""
    text = _NEXT_SENTENCE.split(str(schema.get("description", "a value")))[0].removesuffix(".")
    text = " ".join(text.split())
    return text if text[1:2].isupper() or text.startswith("MLflow") else text[:1].lower() + text[1:]
