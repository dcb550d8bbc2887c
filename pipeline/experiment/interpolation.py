"""Interpolation: ``${...}`` resolved by OmegaConf, with all problems collected."""

import os
import re
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
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
from omegaconf.resolvers import oc

from pipeline.errors import MOST_PROBLEMS, Problem
from pipeline.experiment import deferred, environment, keys
from pipeline.experiment.messages import cut
from pipeline.wording import did_you_mean

_INSIDE_ITSELF = "it refers to a section that it is itself in"
# OmegaConf has no exception types for these. Matched as a whole: parts of other messages may be a user's values.
_NO_KEY = re.compile(r"Interpolation key '(.*)' not found")
_NO_VARIABLE = re.compile(
    r"""KeyError raised while resolving interpolation: "Environment variable '(.*)' not found\""""
)
_REASONS = {
    "Recursive interpolation detected": "it refers to itself",
    "Interpolation to parent node detected": _INSIDE_ITSELF,
}
_LONGEST = 200  # characters of OmegaConf's message, which repeats the value
_UNRESOLVED = re.compile(r"(\\*)\$\{")
_OWN = re.compile(r"(?<!\\)((?:\\\\)*\$\{\s*)oc\.(env|decode)(?=\s*:)")
_OWN_NAMES = r"\1pipeline.\2"
_KEPT = re.compile(f"({deferred.MARKER.pattern}|{environment.REFERENCE.pattern})", re.DOTALL)
"""References that stay in a resolved experiment."""
_place: ContextVar[tuple[keys.Part, ...]] = ContextVar("place", default=())
"""Key whose value is being resolved."""


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace every ``${...}`` in a tree except run-time values, and those that `environment` keeps.

    Values with problems become None.
    """
    with warnings.catch_warnings():  # OmegaConf 2.4 warns of this name; up to 2.3 the new name is another function
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("pipeline.env", _variable, replace=True)
        OmegaConf.register_new_resolver("pipeline.decode", _decode, replace=True)
    resolver = _Resolver(tree)
    return resolver.section(resolver.config, ()), resolver.problems


def _variable(name: str, *default: Any) -> str | None:
    """Resolve ``${oc.env:NAME,default}`` for the key that is being resolved."""
    parts = _place.get()
    is_kept = deferred.keeps_references(parts) or (environment.is_secret(name) and not deferred.shows_everything(parts))
    return environment.read(name, *default, keeps=is_kept)


def _decode(text: Any, _parent_: Any, _node_: Any) -> Any:
    """Resolve ``${oc.decode:...}``, for which a variable's value is shown and written."""
    return oc.decode(environment.resolve_references(text) if isinstance(text, str) else text, _parent_, _node_)


def escape(text: str) -> str:
    """Escape a text, so that resolving gives it back; run-time values and environment variables stay references."""
    kept = [found.span() for found in _KEPT.finditer(text)]

    def escaped(found: re.Match[str]) -> str:
        if any(start <= found.start() < end for start, end in kept):
            return found[0]
        return found[1] * 2 + r"\${"

    return _UNRESOLVED.sub(escaped, text)


class _Resolver:
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self._raw = {keys.join(parts): value for parts, value in keys.walk(tree) if parts}
        self._hidden = set(deferred.RUNTIME_VALUES) - set(tree)
        markers = {name: f"\\{deferred.marker(name)}" for name in self._hidden}
        self.config: DictConfig = OmegaConf.create({**self._checked(tree, ""), **markers})
        self._open: list[int] = []

    def _checked(self, value: Any, key: str) -> Any:
        """Replace strings that OmegaConf can't parse by None and report them; it would stop at the first."""
        if isinstance(value, Mapping):
            return {name: self._checked(inner, keys.child(key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._checked(inner, keys.child(key, i)) for i, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value  # creating a config for each takes long in files with thousands of values
        try:
            OmegaConf.create({"value": value})  # as in the file, since the error repeats it
        except (OmegaConfBaseException, RecursionError):
            message = f"is {cut(value)}, an incomplete ${{...}}. Close the brackets, or write \\${{ for a literal ${{."
            self.problems.append(Problem(key, message))
            return None
        return _OWN.sub(_OWN_NAMES, value)

    def section(self, config: DictConfig | ListConfig, parts: tuple[keys.Part, ...]) -> Any:
        if id(config) in self._open:
            self.problems.append(Problem(keys.join(parts), _INSIDE_ITSELF))
            return None
        self._open.append(id(config))
        if isinstance(config, ListConfig):
            result: Any = [self._value(config, (*parts, i)) for i in range(len(config))]
        else:
            names = [name for name in config if parts or name not in self._hidden]
            result = {name: self._value(config, (*parts, name)) for name in names}
        self._open.pop()
        return result

    def _value(self, config: Any, parts: tuple[keys.Part, ...]) -> Any:
        _place.set(parts)
        try:
            value = config[parts[-1]]
        except (OmegaConfBaseException, RecursionError) as error:
            key = keys.join(parts)
            self.problems.append(Problem(key, self._sentence(error, key)))
            return None
        return self.section(value, parts) if isinstance(value, DictConfig | ListConfig) else value

    def _sentence(self, error: Exception, key: str) -> str:
        said = str(error).splitlines()[0]
        if isinstance(error, MissingMandatoryValue):
            return "has no value (???). Set a value."
        return f"is {cut(self._raw.get(key))}; {self._reason(error, said)}"

    def _reason(self, error: Exception, said: str) -> str:
        if isinstance(error, InterpolationKeyError) and (found := _NO_KEY.fullmatch(said)):
            long = len(found[1]) > _LONGEST
            if found[1] in os.environ:
                return f"there is no key {found[1]}. Write ${{oc.env:{found[1]}}} for the environment variable."
            known = [*self._raw, *deferred.RUNTIME_VALUES] if len(self.problems) < MOST_PROBLEMS and not long else []
            return f"there is no key {found[1][:_LONGEST]}{did_you_mean(found[1], known)}"
        if isinstance(error, InterpolationToMissingValueError):
            return "the key it refers to has no value (???)"
        if isinstance(error, UnsupportedInterpolationType):
            return "this resolver does not exist. Use ${section.key}, or ${oc.env:NAME}."
        if isinstance(error, RecursionError):
            return "it refers to itself"
        if type(error) is InterpolationResolutionError and (found := _NO_VARIABLE.fullmatch(said)):
            return f"the environment variable {found[1]} is not set. Set it, or write ${{oc.env:{found[1]},default}}."
        reason = _REASONS.get(said) or said.partition("while resolving interpolation: ")[2] or said
        return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
