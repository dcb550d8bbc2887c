"""Error messages from pydantic's errors: the value in the file, and the allowed values; and the JSON Schema of both."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from pipeline.errors import MOST_PROBLEMS, Problem
from pipeline.experiment import keys
from pipeline.experiment.keys import Part
from pipeline.experiment.schema import Experiment
from pipeline.experiment.uris import without_credentials
from pipeline.experiment.yaml_text import Loader
from pipeline.wording import did_you_mean, nearest

Schema = Mapping[str, Any]


def _names(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names.split())


_OPTIMIZERS = _names("torch.optim", "SGD AdamW Adam RMSprop Adagrad NAdam")
_SCHEDULERS = _names("torch.optim.lr_scheduler", "CosineAnnealingLR OneCycleLR StepLR MultiStepLR LinearLR")
SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "model": _names("pipeline.models", "MLP GPT resnet18 resnet50 pretrained"),
    "data": _names("pipeline.data", "digits characters tabular texts arrays tokens"),
    "sampler": _names("pipeline.data", "balanced by_length"),
    "loss": _names("torch.nn", "CrossEntropyLoss BCEWithLogitsLoss MSELoss L1Loss SmoothL1Loss NLLLoss"),
    "task": _names("pipeline.tasks", "Supervised LanguageModel FromModel Lightning"),
    "metrics": (
        *_names("torchmetrics.classification", "MulticlassAccuracy MulticlassF1Score MulticlassAUROC"),
        *_names("torchmetrics.classification", "BinaryAccuracy BinaryAUROC"),
        *_names("torchmetrics.regression", "MeanSquaredError MeanAbsoluteError"),
        "torchmetrics.text.Perplexity",
    ),
    "optimizer": _OPTIMIZERS,
    "optimizers": _OPTIMIZERS,
    "scheduler": (*_SCHEDULERS, "torch.optim.lr_scheduler.ReduceLROnPlateau"),
    "schedulers": _SCHEDULERS,
}
"""Components that editors offer, by section; any other name is also valid. A test compares them with the built-in."""


class _WithoutTitles(GenerateJsonSchema):
    """Generator without pydantic's titles, such as "Every Steps" for ``every_steps``."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out all titles."""
        return False


@cache
def schema_of(model: type[BaseModel]) -> Schema:
    """Return the JSON Schema of a section."""
    return model.model_json_schema(by_alias=True, schema_generator=_WithoutTitles)


def follow(schema: Schema, root: Schema) -> Schema:
    """Follow a schema's reference, and drop its other choices; its own description, default and choices stay."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    sections = [choice for choice in choices if "$ref" in choice]
    inner = (sections or choices)[0] if sections or len(choices) == 1 else schema
    if "$ref" in inner:
        inner = root["$defs"][inner["$ref"].rpartition("/")[2]]
    return {**inner, **{name: schema[name] for name in ("description", "default", "anyOf") if name in schema}}


def schema_at(parts: Iterable[Part], model: type[BaseModel] = Experiment) -> Schema:
    """Return the schema of one key; empty if any value is allowed."""
    root = schema_of(model)
    schema: Schema = root
    for part in parts:
        inner = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
        inner = schema.get("items") if isinstance(part, int) else inner
        schema = follow(inner, root) if isinstance(inner, Mapping) else {}
    return schema


def fields_at(parts: Iterable[Part], model: type[BaseModel] = Experiment) -> tuple[str, ...]:
    """Return the keys of a section."""
    return tuple(schema_at(parts, model).get("properties", {}))


def is_component(schema: Schema) -> bool:
    """Return True if a schema, with its reference followed, is a component's."""
    return "_target_" in schema.get("required", ())


def is_argument(parts: tuple[Part, ...]) -> bool:
    """Return True if user code gets a key of an experiment: a section around it takes other keys than its own."""
    sections = ((schema_at(parts[:n]), part) for n, part in enumerate(parts) if parts[-1] != "_target_")
    return any(
        s.get("additionalProperties") is True and part not in s.get("properties", {part: 0}) for s, part in sections
    )


def all_keys(parts: tuple[Part, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of an experiment and its sections, but none inside lists and components."""
    for name in () if is_component(schema_at(parts)) else fields_at(parts):
        yield keys.join((*parts, name))
        yield from all_keys((*parts, name))


def experiment_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the experiment file, with a description of every key."""
    root = copy.deepcopy(dict(schema_of(Experiment)))
    for name, targets in SUGGESTED.items():
        key = root["properties"][name]
        for choice in (key, *key.get("anyOf", ()), key.get("additionalProperties", {})):
            if "$ref" in choice:
                description = f"Dotted name of a class or function in an allowed package, e.g. {targets[0]}."
                target = {"type": "string", "description": description, "examples": list(targets)}
                choice["properties"] = {"_target_": target}
    for section in (root, *root["$defs"].values()):  # the file that this one extends may have the required keys
        section.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}


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
    value, schema = details["input"], schema_at(parts, model)
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
    if is_component(schema) or parts[-1:] == ["_target_"]:
        is_dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
        return f"is {describe_value(value)}; write _target_: {value if is_dotted else 'package.name'}"
    if fields := fields_at(parts, model):
        return f"is {describe_value(value)}; write a mapping with keys from {', '.join(fields)}"
    hint = did_you_mean(value, schema.get("enum", ()), cutoff=0.7) if isinstance(value, str) else ""
    kinds = {choice.get("type") for choice in (schema, *schema.get("anyOf", ()))}
    if isinstance(value, str) and not hint and not kinds.isdisjoint(("integer", "number")):
        hint = hint_at_quotes(value)
    return f"is {describe_value(value)}; write {_describe_allowed(schema)}{hint}"


def _explain_unknown(parts: Sequence[Part], model: type[BaseModel]) -> str:
    """Name the key that was probably meant: one of the same section, or of another one."""
    *section, name = parts
    fields = fields_at(section, model)
    meant = nearest(str(name), fields)
    if not meant and model is Experiment:
        known = {key.rpartition(".")[2]: key for key in reversed([*all_keys()])}
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
