"""What the sections of an experiment file are made of: frozen, strict types."""

import os
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from pipeline import registry
from pipeline.system.signals import postponed


class Frozen(BaseModel):
    """Immutable, strict about keys, and the same after a round trip through JSON (NaN and infinity included)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        ser_json_inf_nan="constants",
    )

    # pydantic's core takes what is raised inside of it for an error of a serializer, a Ctrl-C included.

    @override
    def model_dump(self, **options: Any) -> dict[str, Any]:
        with postponed():
            return super().model_dump(**options)

    @override
    def model_dump_json(self, **options: Any) -> str:
        with postponed():
            return super().model_dump_json(**options)


class WithEnvironment(Frozen):
    """What a process is told together with its environment, whose names and values may be any bytes."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    environment: tuple[tuple[bytes, bytes], ...]
    """Names and values, of all variables; see `encoded`."""

    @staticmethod
    def encoded(environment: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
        """An environment such as ``os.environ``."""
        return tuple((os.fsencode(name), os.fsencode(value)) for name, value in environment.items())

    def enter(self) -> None:
        """Make it the environment of this process."""
        os.environ.clear()
        os.environb.update(self.environment)


class Section(Frozen):
    """A part of the experiment file. What is written below a key describes it in the JSON Schema, which takes time."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Component(Section):
    """``_target_: package.name`` with its keyword arguments; nested mappings with a ``_target_`` are built first."""

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, Field(alias="_target_", pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    """Dotted name of a class or function in an allowed package."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The keyword arguments as written in the file (nested components are still plain mappings)."""
        return self.model_extra or {}


def _known(kind: registry.Kind) -> AfterValidator:
    def check(name: str) -> str:
        if name not in (known := registry.names(kind)):
            raise ValueError(f"unknown; choose one of {', '.join(known)}")
        return name

    return AfterValidator(check)


def _writable(text: str) -> str:
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ValueError("holds a control character, which no file or address can have; remove it")
    return text


Writable = Annotated[str, AfterValidator(_writable)]
"""What becomes a part of files' names or addresses."""
StrategyName = Annotated[str, _known("strategies")]
LauncherName = Annotated[str, _known("launchers")]
Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True)]
Direction = Literal["min", "max"]
"""Which values of a metric are good, in the words of Ray Tune and Optuna."""
Mode = Literal["auto", Direction]


def _switched(value: object) -> object:
    """Yes is all of the defaults, no is nothing."""
    return {} if value is True else None if value is False else value


def _or_boolean(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "boolean"}, *schema["anyOf"]]


SWITCH = BeforeValidator(_switched)
"""For a section that may also be ``true`` or ``false``."""
OR_BOOLEAN = Field(json_schema_extra=_or_boolean)
