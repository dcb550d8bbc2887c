"""Resolves ``${...}`` with OmegaConf and collects what can't be resolved."""

import re
from collections.abc import Iterator, Mapping
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

from pipeline.config import keys, runtime, secrets
from pipeline.config.expansion import LIMIT, Expansion
from pipeline.config.messages import cut
from pipeline.config.nearest import did_you_mean
from pipeline.errors import MOST_PROBLEMS, Problem

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


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree with every ``${...}`` replaced; run-time values stay as they are. Problem values become None."""
    resolver = _Resolver(tree)
    return resolver.section(resolver.config, ""), resolver.problems


def escape(text: str) -> str:
    """The text as a file has to spell it, so that resolving leads back to it; run-time values and secrets stay."""

    def escaped(found: re.Match[str]) -> str:
        whole = text[found.start() :].split("}")[0] + "}"
        if not found[1] and (runtime.named_in(whole) or secrets.named_in(whole)):
            return found[0]
        return found[1] * 2 + r"\${"

    return _UNRESOLVED.sub(escaped, text)


class _Resolver:
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self._known = [key for key, _ in _leaves(tree, "")]
        self._raw = dict(_leaves(tree, ""))
        self._hidden = set(runtime.RUNTIME_VALUES) - set(tree)
        self._expansion = Expansion(self._raw)
        markers = {name: f"\\{runtime.marker(name)}" for name in self._hidden}
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
            known = [*self._known, *runtime.RUNTIME_VALUES] if len(self.problems) < MOST_PROBLEMS and not long else []
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
