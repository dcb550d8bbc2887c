"""The experiment file as JSON Schema: for editors, and for sentences about what belongs where."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from pipeline import registry
from pipeline.config import keys
from pipeline.config.keys import Part
from pipeline.config.schema import Experiment

Schema = Mapping[str, Any]

_NAMED: dict[str, registry.Kind] = {"strategy": "strategies", "launcher": "launchers"}
SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "model": (
        "pipeline.models.MLP",
        "pipeline.models.GPT",
        "pipeline.models.resnet18",
        "pipeline.models.resnet34",
        "pipeline.models.resnet50",
    ),
    "data": (
        "pipeline.data.digits",
        "pipeline.data.cifar10",
        "pipeline.data.characters",
        "pipeline.data.arrays",
        "pipeline.data.tokens",
        "pipeline.data.shards",
        "pipeline.data.streamed",
    ),
    "loss": (
        "torch.nn.CrossEntropyLoss",
        "torch.nn.BCEWithLogitsLoss",
        "torch.nn.MSELoss",
        "torch.nn.L1Loss",
        "torch.nn.SmoothL1Loss",
        "torch.nn.NLLLoss",
    ),
    "task": ("pipeline.tasks.Supervised", "pipeline.tasks.LanguageModel"),
    "metrics": (
        "torchmetrics.classification.MulticlassAccuracy",
        "torchmetrics.classification.MulticlassF1Score",
        "torchmetrics.classification.MulticlassAUROC",
        "torchmetrics.classification.BinaryAccuracy",
        "torchmetrics.classification.BinaryAUROC",
        "torchmetrics.regression.MeanSquaredError",
        "torchmetrics.regression.MeanAbsoluteError",
        "torchmetrics.text.Perplexity",
    ),
    "optimizer": (
        "torch.optim.SGD",
        "torch.optim.AdamW",
        "torch.optim.Adam",
        "torch.optim.RMSprop",
        "torch.optim.Adagrad",
        "torch.optim.NAdam",
    ),
    "scheduler": (
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.optim.lr_scheduler.OneCycleLR",
        "torch.optim.lr_scheduler.StepLR",
        "torch.optim.lr_scheduler.MultiStepLR",
        "torch.optim.lr_scheduler.LinearLR",
        "torch.optim.lr_scheduler.ReduceLROnPlateau",
    ),
}
"""By section. A test holds them to be there, and the built-in models, data and tasks to be complete."""


def experiment_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the experiment file, with a description of every key."""
    return copy.deepcopy(dict(Shape.of(Experiment).root))


class _WithoutTitles(GenerateJsonSchema):
    """Pydantic would call ``every_steps`` "Every Steps", which tells nobody anything."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """As in the base class."""
        return False


class Shape:
    """A JSON Schema with its references followed."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    @staticmethod
    @cache
    def of(model: type[BaseModel]) -> "Shape":
        """The shape of a model; strategies and launchers are the ones that are installed."""
        described = model.model_json_schema(by_alias=True, schema_generator=_WithoutTitles)
        root = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
        for name, targets in SUGGESTED.items() if model is Experiment else ():
            _suggest(root["properties"][name], targets)
        for section in (root, *root.get("$defs", {}).values()):
            for name, kind in _NAMED.items():
                if name in section.get("properties", {}):
                    section["properties"][name]["enum"] = list(registry.names(kind))
        return Shape(root)

    def at(self, parts: Iterable[Part]) -> Schema:
        """The schema of one key; empty where anything may stand."""
        schema = self.follow(self.root)
        for part in parts:
            schema = self._step(schema, part)
        return schema

    def fields(self, parts: Iterable[Part]) -> tuple[str, ...]:
        """Names of the keys of a section."""
        return tuple(self.at(parts).get("properties", {}))

    def is_component(self, parts: Iterable[Part]) -> bool:
        """Whether the key holds a ``_target_`` with its arguments."""
        return "_target_" in self.at(parts).get("properties", {})

    def in_component(self, parts: tuple[Part, ...]) -> bool:
        """Whether the key is an argument of a component."""
        return any(self.is_component(parts[:n]) and parts[n] != "_target_" for n in range(len(parts)))

    def all_keys(self, parts: tuple[Part, ...] = ()) -> Iterator[str]:
        """The dotted keys of all sections; lists and components aren't looked into."""
        if self.is_component(parts):
            return
        for name in self.fields(parts):
            yield keys.join((*parts, name))
            yield from self.all_keys((*parts, name))

    def follow(self, schema: Schema) -> Schema:
        """A schema with its reference followed, and without "or null" around it; its own description stays.

        Neither does "or true or false" count beside a section, which it switches.
        """
        choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
        if any("$ref" in choice for choice in choices):
            choices = [choice for choice in choices if choice.get("type") != "boolean"]
        inner = choices[0] if len(choices) == 1 else schema
        if "$ref" in inner:
            inner = self.root["$defs"][inner["$ref"].rpartition("/")[2]]
        elif inner is schema:
            return schema
        own = {name: schema[name] for name in ("description", "default", "anyOf") if name in schema}
        return {**inner, **own}

    def _step(self, schema: Schema, part: Part) -> Schema:
        inner = schema.get("items") if isinstance(part, int) else schema.get("properties", {}).get(part)
        if inner is None and isinstance(part, str):
            inner = schema.get("additionalProperties")
        return self.follow(inner) if isinstance(inner, Mapping) else {}


def _suggest(schema: dict[str, Any], targets: Sequence[str]) -> None:
    """Name some components where one belongs: directly, in an "or null", or in a mapping of them."""
    inner = schema.get("additionalProperties")
    for place in (schema, *schema.get("anyOf", ()), *([inner] if isinstance(inner, dict) else [])):
        if "$ref" in place:
            told = f"Dotted name of a class or function in an allowed package, e.g. {targets[0]}."
            place["properties"] = {"_target_": {"type": "string", "description": told, "examples": list(targets)}}
