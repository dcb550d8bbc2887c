"""JSON Schema of the experiment file, for editors and error messages, with suggested components."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from pipeline import registry
from pipeline.experiment import keys, lightning_module
from pipeline.experiment.keys import Part
from pipeline.experiment.schema import Experiment

Schema = Mapping[str, Any]

_NAMED: dict[str, registry.Kind] = {"strategy": "strategies", "launcher": "launchers"}
_OPTIMIZERS = (
    "torch.optim.SGD",
    "torch.optim.AdamW",
    "torch.optim.Adam",
    "torch.optim.RMSprop",
    "torch.optim.Adagrad",
    "torch.optim.NAdam",
)
_SCHEDULERS = (
    "torch.optim.lr_scheduler.CosineAnnealingLR",
    "torch.optim.lr_scheduler.OneCycleLR",
    "torch.optim.lr_scheduler.StepLR",
    "torch.optim.lr_scheduler.MultiStepLR",
    "torch.optim.lr_scheduler.LinearLR",
)
SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "model": (
        "pipeline.models.MLP",
        "pipeline.models.GPT",
        "pipeline.models.resnet18",
        "pipeline.models.resnet50",
        "pipeline.models.pretrained",
    ),
    "data": (
        "pipeline.data.digits",
        "pipeline.data.characters",
        "pipeline.data.tabular",
        "pipeline.data.texts",
        "pipeline.data.arrays",
        "pipeline.data.tokens",
    ),
    "sampler": ("pipeline.data.balanced", "pipeline.data.by_length"),
    "loss": (
        "torch.nn.CrossEntropyLoss",
        "torch.nn.BCEWithLogitsLoss",
        "torch.nn.MSELoss",
        "torch.nn.L1Loss",
        "torch.nn.SmoothL1Loss",
        "torch.nn.NLLLoss",
    ),
    "task": (
        "pipeline.tasks.Supervised",
        "pipeline.tasks.LanguageModel",
        "pipeline.tasks.FromModel",
        "pipeline.tasks.Lightning",
    ),
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
    "optimizer": _OPTIMIZERS,
    "optimizers": _OPTIMIZERS,
    "scheduler": (*_SCHEDULERS, "torch.optim.lr_scheduler.ReduceLROnPlateau"),
    "schedulers": _SCHEDULERS,
}
"""Components that editors and shells offer, by section; any other name is valid, too.

A test holds that they exist, and that all built-in models, data, samplers and tasks are listed.
"""


def experiment_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the experiment file, with a description of every key.

    A file that extends another may leave out what is required.
    """
    schema = copy.deepcopy(dict(Shape.of(Experiment).root))
    complete = _required(schema, Shape.of(Experiment))
    complete |= lightning_module.required(complete["required"])
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    return {**schema, "if": {"not": {"required": ["extends"]}}, "then": complete}


def _required(schema: Schema, shape: "Shape") -> dict[str, Any]:
    """Return a schema that demands the required keys of a section, and of those inside, and nothing else."""
    section = shape.follow(schema)
    inner = {name: found for name, value in section.get("properties", {}).items() if (found := _required(value, shape))}
    each = {
        name: found
        for name in ("items", "additionalProperties")
        if isinstance(section.get(name), Mapping) and (found := _required(section[name], shape))
    }
    own = {"required": section["required"]} if "required" in section else {}
    return {**own, **({"properties": inner} if inner else {}), **each}


class _WithoutTitles(GenerateJsonSchema):
    """Generator that leaves out pydantic's titles, such as "Every Steps" for ``every_steps``."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out all titles."""
        return False


def describes_component(schema: Schema) -> bool:
    """Tell if a schema, with its reference followed, is that of a component; a section may do without a target."""
    return "_target_" in schema.get("required", ())


class Shape:
    """A JSON Schema that is looked up by key, with its references followed."""

    def __init__(self, root: Schema) -> None:
        self.root = root

    @staticmethod
    @cache
    def of(model: type[BaseModel]) -> "Shape":
        """Return the shape of a model; strategies and launchers are limited to the installed ones."""
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
        """Return the schema of one key; empty if any value is allowed."""
        schema = self.follow(self.root)
        for part in parts:
            schema = self._step(schema, part)
        return schema

    def fields(self, parts: Iterable[Part]) -> tuple[str, ...]:
        """Return the keys of a section."""
        return tuple(self.at(parts).get("properties", {}))

    def is_component(self, parts: Iterable[Part]) -> bool:
        """Tell if the key holds a component."""
        return describes_component(self.at(parts))

    def in_component(self, parts: tuple[Part, ...]) -> bool:
        """Tell if the key is an argument of a component."""
        return any(self.is_component(parts[:n]) and parts[n] != "_target_" for n in range(len(parts)))

    def in_arguments(self, parts: tuple[Part, ...]) -> bool:
        """Return True if user code gets the key: a section takes arguments besides its declared keys."""
        if not parts or parts[-1] == "_target_":
            return False
        return any(self._takes(self.at(parts[:n]), parts[n]) for n in range(len(parts)))

    def _takes(self, schema: Schema, part: Part) -> bool:
        """Return True if a section, or one that a key may hold, takes other keys than its declared ones."""
        sections = (schema, *map(self.follow, schema.get("anyOf", ())))
        return any(
            section.get("additionalProperties") is True and part not in section.get("properties", {part: None})
            for section in sections
        )

    def all_keys(self, parts: tuple[Part, ...] = ()) -> Iterator[str]:
        """Yield the dotted keys of all sections, but none inside lists and components."""
        if self.is_component(parts):
            return
        for name in self.fields(parts):
            yield keys.join((*parts, name))
            yield from self.all_keys((*parts, name))

    def follow(self, schema: Schema) -> Schema:
        """Follow a schema's reference and drop its "or null"; its own description and default stay.

        The "or boolean" of a section that can be switched on and off is dropped, too, and the "or string" of a section
        that can be written as its name.
        """
        choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
        if any("$ref" in choice for choice in choices):
            choices = [choice for choice in choices if choice.get("type") not in ("boolean", "string")]
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
    """Add examples of components to a key that takes one, directly, in an "or null", or in a mapping of them."""
    inner = schema.get("additionalProperties")
    for choice in (schema, *schema.get("anyOf", ()), *([inner] if isinstance(inner, dict) else [])):
        if "$ref" in choice:
            description = f"Dotted name of a class or function in an allowed package, e.g. {targets[0]}."
            choice["properties"] = {
                "_target_": {"type": "string", "description": description, "examples": list(targets)}
            }
