"""JSON Schema of the experiment file, for editors and error messages, with suggested components."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from pipeline.experiment import keys
from pipeline.experiment.keys import Part
from pipeline.experiment.schema import Experiment

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


def at(parts: Iterable[Part], model: type[BaseModel] = Experiment) -> Schema:
    """Return the schema of one key; empty if any value is allowed."""
    root = schema_of(model)
    schema: Schema = root
    for part in parts:
        inner = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
        inner = schema.get("items") if isinstance(part, int) else inner
        schema = follow(inner, root) if isinstance(inner, Mapping) else {}
    return schema


def fields(parts: Iterable[Part], model: type[BaseModel] = Experiment) -> tuple[str, ...]:
    """Return the keys of a section."""
    return tuple(at(parts, model).get("properties", {}))


def is_component(schema: Schema) -> bool:
    """Return True if a schema, with its reference followed, is a component's."""
    return "_target_" in schema.get("required", ())


def is_argument(parts: tuple[Part, ...]) -> bool:
    """Return True if user code gets a key of an experiment: a section around it takes other keys than its own."""
    sections = ((at(parts[:n]), part) for n, part in enumerate(parts) if parts[-1] != "_target_")
    return any(
        s.get("additionalProperties") is True and part not in s.get("properties", {part: 0}) for s, part in sections
    )


def all_keys(parts: tuple[Part, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of an experiment and its sections, but none inside lists and components."""
    for name in () if is_component(at(parts)) else fields(parts):
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
