"""Base classes and field types of the experiment's sections, frozen and strict."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from pipeline.experiment.uris import expand_home
from pipeline.system import defer_signals


class Frozen(BaseModel):
    """Immutable model that rejects unknown keys and survives a round trip through JSON, NaN and infinity included."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="constants"
    )

    # pydantic's core reports any exception raised inside it, even a KeyboardInterrupt, as a serializer's error.

    @override
    def model_dump(self, **options: Any) -> dict[str, Any]:
        with defer_signals():
            return super().model_dump(**options)

    @override
    def model_dump_json(self, **options: Any) -> str:
        with defer_signals():
            return super().model_dump_json(**options)


class Recorded(Frozen):
    """Record that is valid JSON: NaN and infinity are the strings "NaN", "Infinity" and "-Infinity".

    It is read back as it was, except for values of fields without a type. Fields that were removed since it was
    written are ignored.
    """

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")


class Section(Frozen):
    """Section of the experiment file. The docstring below each key is its description in the JSON Schema."""

    model_config = ConfigDict(use_attribute_docstrings=True)


_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
DottedName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]


class Component(Section):
    """Component: ``_target_: package.name`` with keyword arguments; nested components are built first."""

    model_config = ConfigDict(extra="allow")

    target: Annotated[DottedName, Field(alias="_target_")]
    """Dotted name of a class or function in an allowed package."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Keyword arguments as written in the file; nested components are plain mappings."""
        return self.model_extra or {}


Create = Callable[..., Any]
"""Function that builds a component, given its key: `components.build` with the allowed packages filled in."""


Writable = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""String that becomes part of a file name or an address: without control characters."""


def _expand_home(text: str) -> str:
    if "://" in text:
        return text
    if variable := _VARIABLE.search(text):
        instead = f"To insert this environment variable, use ${{oc.env:{variable[1]}}}."
        raise ValueError(f"{variable[0]} is not expanded in paths. {instead}")
    return expand_home(text)


FilePath = Annotated[Writable, AfterValidator(_expand_home)]
"""Path of a file or folder, or an address with a protocol; ``~`` is expanded."""
Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True)]
Direction = Literal["min", "max"]  # Direction in which a metric improves, in the words of Ray Tune and Optuna
Mode = Literal["auto", Direction]


def _add_choice(kind: str) -> Any:
    def add(schema: dict[str, Any]) -> None:
        schema["anyOf"] = [{"type": kind}, *schema["anyOf"]]

    return Field(json_schema_extra=add)


Of = TypeVar("Of")
OrName = Annotated[
    Of | None,
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
    _add_choice("string"),
]
"""A section that may also be its ``name`` alone."""
OrSwitch = Annotated[
    Of | None,
    BeforeValidator(lambda value: {} if value is True else None if value is False else value),
    _add_choice("boolean"),
]
"""A section that may also be ``true`` (its defaults) or ``false`` (none)."""
