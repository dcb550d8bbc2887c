"""The section ``sampler`` of an experiment: which training samples form an epoch, and in what order."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
)

from pipeline.config.values import Component, DottedName, Section

KINDS = ("weights", "bucket_by", "_target_")
"""Keys of the section, of which one is given."""


def _weights(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Validate ``weights``; name the first entry of a list that is no weight."""
    try:
        weights = handler(value)
    except ValidationError:
        number, wrong = next(_not_weights(value), (None, None))
        entry = f"entry {number} is {wrong!r}, " if number is not None else ""
        expected = "balanced, a list with one number of at least 0 per sample, or _target_: package.name"
        raise ValueError(f"{entry}write {expected}") from None
    if isinstance(weights, tuple) and not any(weights):
        raise ValueError("no entry is greater than 0, so no sample could be drawn")
    return weights


def _not_weights(value: object) -> Any:
    for number, entry in enumerate(value if isinstance(value, list | tuple) else (), start=1):
        is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
        if not is_number or not math.isfinite(entry) or entry < 0:
            yield number, entry


def _bucket_by(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    try:
        return handler(value)
    except ValidationError:
        raise ValueError("write length, or _target_: package.name") from None


Weight = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class SamplerOptions(Section):
    """Order of the training samples, by one of these keys; without it, each sample comes once in an epoch, shuffled.

    It is a function of seed and epoch, so that any number of workers trains on the same global batches, and a resumed
    training continues with the batch that was next (docs/data.md).
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "if": {"not": {"required": ["_target_"]}},
            "then": {"propertyNames": {"enum": [*KINDS]}},
        },
    )

    weights: Annotated[Literal["balanced"] | tuple[Weight, ...] | Component | None, WrapValidator(_weights)] = None
    """Weighted sampling with replacement; an epoch has as many draws as samples. balanced: all classes equally often.
    Otherwise a list with one weight per sample, or a component, called with the training set, that returns it."""
    bucket_by: Annotated[Literal["length"] | Component | None, WrapValidator(_bucket_by)] = None
    """Build global batches from samples of similar length, and shuffle the batches, to reduce padding. length: the
    length of a sample's first field. Otherwise a component, called with the training set, that returns one number per
    sample."""
    target: Annotated[DottedName | None, Field(alias="_target_")] = None
    """Function (training set, epoch, generator) that returns the indices of an epoch's samples. Further keys are its
    other arguments. Epochs count from 0. All epochs have the same number of indices, and indices may repeat."""

    @model_serializer(mode="wrap")
    def _only_what_is_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name not in KINDS or value}

    @property
    def given(self) -> tuple[str, ...]:
        """Keys that are given; exactly one in a valid file."""
        values = (self.weights, self.bucket_by, self.target)
        return tuple(key for key, value in zip(KINDS, values, strict=True) if value is not None)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments beside ``_target_``."""
        return self.model_extra or {}

    @property
    def function(self) -> Component | None:
        """Component of ``_target_``; None without it."""
        if self.target is None:
            return None
        return Component.model_validate({"_target_": self.target, **self.arguments}, by_alias=True, by_name=False)

    @property
    def components(self) -> Iterator[tuple[str, Component]]:
        """Components of the section with their keys."""
        for key, value in (("sampler.weights", self.weights), ("sampler.bucket_by", self.bucket_by)):
            if isinstance(value, Component):
                yield key, value
        if self.function is not None:
            yield "sampler", self.function

    @property
    def words(self) -> str:
        """Order in words, for a plan."""
        if self.bucket_by is not None:
            what = "length" if self.bucket_by == "length" else self.bucket_by.target
            return f"global batches of samples of similar {what}, shuffled"
        if self.weights == "balanced":
            return "equal shares of all classes; in an epoch a sample may come several times, or not at all"
        if self.weights is not None:
            whose = self.weights.target if isinstance(self.weights, Component) else "sampler.weights"
            return f"drawn by the weights of {whose}; in an epoch a sample may come several times, or not at all"
        return f"by {self.target}"
