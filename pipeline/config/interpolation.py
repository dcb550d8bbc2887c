"""Resolves ``${...}`` with OmegaConf and collects what can't be resolved."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from pipeline.config import deferred, keys
from pipeline.config.messages import cut
from pipeline.errors import MOST_PROBLEMS, Problem
from pipeline.wording import did_you_mean

_INSIDE_ITSELF = "it refers to a section that it is itself in"
# OmegaConf has no types, and no attributes, for these: whole texts, since a part of another one may be a value.
_NO_KEY = re.compile(r"Interpolation key '(.*)' not found")
_NO_VARIABLE = re.compile(
    r"""KeyError raised while resolving interpolation: "Environment variable '(.*)' not found\""""
)
_REASONS = {
    "Recursive interpolation detected": "it refers to itself",
    "Interpolation to parent node detected": _INSIDE_ITSELF,
}
_LONGEST = 200  # characters of what OmegaConf says, which repeats the value
_UNRESOLVED = re.compile(r"(\\*)\$\{")
LIMIT = 1_000_000
"""Characters of one value; an experiment has some thousand in all."""
_VALUE = 100
"""What each value of a section counts for beside its text, since it takes that much longer to put in."""
_REFERENCE = re.compile(r"\$\{\s*([^${}:]+?)\s*\}")
_INDEX = re.compile(r"\[(\w+)\]")


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree with every ``${...}`` replaced; run-time values stay as they are. Problem values become None."""
    resolver = _Resolver(tree)
    return resolver.section(resolver.config, ""), resolver.problems


def escape(text: str) -> str:
    """The text as a file has to spell it, so that resolving leads back to it; run-time values and secrets stay."""

    def escaped(found: re.Match[str]) -> str:
        whole = text[found.start() :].split("}")[0] + "}"
        if not found[1] and (deferred.runtime_values_in(whole) or deferred.secrets_in(whole)):
            return found[0]
        return found[1] * 2 + r"\${"

    return _UNRESOLVED.sub(escaped, text)


class _Resolver:
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self._known = [key for key, _ in _leaves(tree, "")]
        self._raw = dict(_leaves(tree, ""))
        self._hidden = set(deferred.RUNTIME_VALUES) - set(tree)
        self._expansion = Expansion(self._raw)
        markers = {name: f"\\{deferred.marker(name)}" for name in self._hidden}
        self.config: DictConfig = OmegaConf.create({**self._checked(tree, ""), **markers})
        self._open: list[int] = []

    def _checked(self, value: Any, key: str) -> Any:
        """The value without texts that OmegaConf can't read; it would stop at the first."""
        if isinstance(value, Mapping):
            return {name: self._checked(inner, keys.child(key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._checked(inner, keys.child(key, i)) for i, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value  # creating a config of each takes long in a file with thousands of values
        if self._expansion.is_too_long(key):
            if key == self._expansion.least:
                message = (
                    f"is {cut(value)}, more than {LIMIT:,} characters with all that it refers to; refer less often"
                )
                self.problems.append(Problem(key, message))
            return None
        try:
            OmegaConf.create({"value": value})
        except (OmegaConfBaseException, RecursionError):
            message = (
                f"is {cut(value)}, which is not a whole ${{...}}; close its brackets, or write \\${{ for the text ${{"
            )
            self.problems.append(Problem(key, message))
            return None
        return value

    def section(self, config: DictConfig | ListConfig, key: str) -> Any:
        if id(config) in self._open:
            self.problems.append(Problem(key, _INSIDE_ITSELF))
            return None
        self._open.append(id(config))
        if isinstance(config, ListConfig):
            result: Any = [self._value(config, i, keys.child(key, i)) for i in range(len(config))]
        else:
            names = [name for name in config if key or name not in self._hidden]
            result = {name: self._value(config, name, keys.child(key, name)) for name in names}
        self._open.pop()
        return result

    def _value(self, config: Any, name: keys.Part, key: str) -> Any:
        try:
            value = config[name]
        except (OmegaConfBaseException, RecursionError) as error:
            self.problems.append(Problem(key, self._sentence(error, key)))
            return None
        return self.section(value, key) if isinstance(value, DictConfig | ListConfig) else value

    def _sentence(self, error: Exception, key: str) -> str:
        said = str(error).splitlines()[0]
        if isinstance(error, MissingMandatoryValue):
            return "is left open (???); give it a value"
        return f"is {cut(self._raw.get(key))}; {self._reason(error, said)}"

    def _reason(self, error: Exception, said: str) -> str:
        if isinstance(error, InterpolationKeyError) and (found := _NO_KEY.fullmatch(said)):
            long = len(found[1]) > _LONGEST
            known = [*self._known, *deferred.RUNTIME_VALUES] if len(self.problems) < MOST_PROBLEMS and not long else []
            return f"there is no key {found[1][:_LONGEST]}{did_you_mean(found[1], known)}"
        if isinstance(error, InterpolationToMissingValueError):
            return "the value it refers to is left open (???)"
        if isinstance(error, UnsupportedInterpolationType):
            return "there is no such function; write ${section.key}, or ${oc.env:NAME}"
        if isinstance(error, RecursionError):
            return "it refers to itself"
        if type(error) is InterpolationResolutionError and (found := _NO_VARIABLE.fullmatch(said)):
            return f"the environment variable {found[1]} is not set; set it, or write ${{oc.env:{found[1]},default}}"
        reason = _REASONS.get(said) or said.partition("while resolving interpolation: ")[2] or said
        return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Every key with its value, sections included."""
    if key:
        yield key, value
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, keys.child(key, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _leaves(inner, keys.child(key, i))


class Expansion:
    """Lengths of values, counted and never built.

    Args:
        values: what stands under each dotted key, sections included.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._texts = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
        self._values = {_dotted(key): value for key, value in values.items()}
        self._lengths: dict[str, int] = {}

    def is_too_long(self, key: str) -> bool:
        """Whether what stands there has more than `LIMIT` characters in the end."""
        try:
            return self._length(_dotted(key)) > LIMIT
        except RecursionError:  # a chain of hundreds, which OmegaConf doesn't follow either
            return False

    @cached_property
    def least(self) -> str:
        """The key of the least of those texts that are too long: where it begins."""
        long = [key for key in self._texts if self.is_too_long(key)]
        return min(long, key=lambda key: self._length(_dotted(key)), default="")

    def _length(self, key: str) -> int:
        if key not in self._lengths:
            self._lengths[key] = 0  # of what refers to itself, which is an error of its own
            own = self._values.get(key)
            inner = _children(own, key)
            total = sum(map(self._length, inner)) if inner else _VALUE + len(str(own))
            self._lengths[key] = total + sum(map(self._length, self._references(key)))
        return self._lengths[key]

    def _references(self, key: str) -> Iterator[str]:
        value = self._values.get(key)
        if isinstance(value, str):
            yield from (_absolute(found[1], key) for found in _REFERENCE.finditer(value))


def _children(value: object, key: str) -> list[str]:
    names = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list) else ()
    return [f"{key}.{name}" for name in names]


def _absolute(reference: str, key: str) -> str:
    """One dot stands for the section that the value is in, each further dot for the one around it."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    above = key.split(".")[:-dots] if dots else []
    return ".".join([*above, _dotted(name)])


def _dotted(key: str) -> str:
    return _INDEX.sub(r".\1", key)
