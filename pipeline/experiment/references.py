"""References ``${...}``: to other keys, to variables of the environment, to run-time values such as ``${total_steps}``.

An `Experiment` has the arguments of components and the tags as they are written, so that no value of the environment
is written down: it may be a password, whatever the variable is called. `fill_in` puts values in where components are
built. All other keys get their values when the file is read, by `resolve`, which also tries those in arguments.
"""

import os
import re
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from omegaconf.resolvers import oc

from pipeline.errors import MOST_PROBLEMS, ExperimentError, Problem
from pipeline.experiment import keys
from pipeline.experiment.problems import is_argument, shorten
from pipeline.experiment.schema import Experiment
from pipeline.wording import did_you_mean

RUNTIME_VALUES = ("total_steps", "steps_per_epoch", "world_size")
"""Optimizer steps of the whole training; steps of an epoch; processes. Known once the data is loaded."""
_Mode = Literal["read", "fill", "show"]
"""Values of variables that are not set, or (read) secrets by their names, or (show) all of them stay references."""
_URI = "tracking.uri"
"""The only key outside of components that may hold a secret: the schema serializes it without credentials."""
_UNKNOWN = re.compile(
    rf"\$\{{(?:({'|'.join(RUNTIME_VALUES)})|oc\.(?:decode:\$\{{oc\.)?env:([^\s{{}},']+)[^{{}}]*\}}?)\}}"
)
"""Run-time value or variable that has stayed a reference."""
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,([^{}]*))?\}")
_OWN = re.compile(r"(?<!\\)((?:\\\\)*\$\{\s*)oc\.(env|decode)\s*:")
_DECODED = re.compile(r"(?<=\$\{oc\.decode:)\$\{oc\.env:(\w+)[^{}]*\}(?=\})")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_SECRET_NAME = re.compile(r"\w*(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_\w*)?", re.IGNORECASE)
_SHORTEST, _COMMON = 4, ("true", "false", "none", "null")
"""Length of the shortest value that is searched for in messages, and values that occur in ordinary ones."""
_LONGEST = 200  # characters of OmegaConf's message, which repeats the value
_DEEPEST = 60  # sections, of which a section that refers to itself has no end

_built_with: dict[str, str] = {}  # References by the values that components of this process received


def is_secret(name: str) -> bool:
    """Return True if a variable is a secret by its name, which no key outside of components may show."""
    return _SECRET_NAME.fullmatch(name) is not None


def fill_in(
    experiment: Experiment, runtime: Mapping[str, int] = MappingProxyType({}), *, mode: _Mode = "fill"
) -> Experiment:
    """Return an experiment with values in place of references, to build its components; never write it down.

    Run-time values that are not in ``runtime`` and variables that are not set in this process stay references, see
    `explain_unknown`. With mode "show" all variables do, so that it may be written.
    """
    plain = experiment.model_dump(mode="json")
    if "${" not in str(plain):
        return experiment
    if experiment.is_lightning:  # what the file may call it
        plain["task"]["module"] = plain["model"]
    config = _create(_map_strings(plain, lambda text: _use_own_resolvers(text, mode)), runtime)
    try:
        found = {name: config[name] for name in plain if name != "sweep"}
        values = {
            name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for name, value in found.items()
        }
    except (OmegaConfBaseException, RecursionError) as error:
        raise ExperimentError.of(getattr(error, "full_key", None) or "", _explain(error, ())) from None
    if experiment.is_lightning:
        del values["task"]["module"]
    return Experiment.model_validate(values | {"sweep": plain["sweep"]})


def explain_unknown(text: str) -> str:
    """Return why an argument that `fill_in` returned can't be used; empty if it can."""
    found = _UNKNOWN.search(text)
    if found is None or (found[2] or "") in os.environ:  # the text is a value itself
        return ""
    if found[1]:
        return f"{marker(found[1])} has no value yet when this is built. Use a number instead."
    where = f"on {os.uname().nodename}, where it is built. Its value is not sent there. Set it on each node."
    return f"the environment variable {found[2]} is not set {where}"


def explain_unset(name: str) -> str:
    """Return the message about an environment variable that is not set."""
    return f"the environment variable {name} is not set. Set it, or write ${{oc.env:{name},default}}."


def find_unset_variables(text: str) -> tuple[str, ...]:
    """Return the names of the environment variables that have stayed references in a text."""
    return tuple(found[2] for found in _UNKNOWN.finditer(text) if found[2] and found[2] not in os.environ)


def marker(name: str) -> str:
    """Return the reference to a run-time value, e.g. "${total_steps}"."""
    return f"${{{name}}}"


def redact(text: str) -> str:
    """Replace the values that components of this process received by their references, e.g. in an exception's text."""
    shown = {
        form: reference
        for value, reference in _built_with.items()
        if len(value) >= _SHORTEST and value.lower() not in _COMMON
        for form in (value, repr(value)[1:-1], quote(value, safe=""))
    }
    if not shown:
        return text
    longest_first = "|".join(map(re.escape, sorted(shown, key=len, reverse=True)))
    # Within a longer word it is part of that word.
    return re.sub(rf"(?<![a-zA-Z0-9])(?:{longest_first})(?![a-zA-Z0-9])", lambda found: shown[found[0]], text)


def resolve(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Resolve all references of a file except those in arguments and tags, which are tried.

    Values with problems become None. Numbers of the environment that are decoded replace their references.
    """
    problems = list[Problem]()
    known = [keys.join(parts) for parts, _ in keys.walk(tree) if parts]

    def prepare(value: Any, key: str) -> Any:
        """Replace strings that OmegaConf can't parse by None and report them; it would stop at the first."""
        if isinstance(value, Mapping):
            return {name: prepare(inner, keys.child(key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [prepare(inner, keys.child(key, n)) for n, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value  # creating a config for each takes long in files with thousands of values
        try:
            OmegaConf.create({"value": value})
        except (OmegaConfBaseException, RecursionError):
            close = "Close the brackets, or write \\${ for a literal ${."
            problems.append(Problem(key, f"is {shorten(value)}, an incomplete ${{...}}. {close}"))
            return None
        return _use_own_resolvers(value, "read")

    def read_section(config: DictConfig | ListConfig, raw: Any, parts: tuple[keys.Part, ...]) -> Any:
        if len(parts) > _DEEPEST:
            raise RecursionError
        if isinstance(config, ListConfig):
            return [read_value(config, raw[n], (*parts, n)) for n in range(len(config))]
        return {str(name): read_value(config, raw[name], (*parts, str(name))) for name in config if name in raw}

    def read_value(config: Any, raw: Any, parts: tuple[keys.Part, ...]) -> Any:
        key, is_reference = keys.join(parts), isinstance(raw, str) and "${" in raw
        is_kept = is_reference and _keeps_references(parts)
        try:
            value = config[parts[-1]]
            if isinstance(value, DictConfig | ListConfig):
                inner = _map_strings(OmegaConf.to_container(value), _use_public_resolvers) if is_reference else raw
                found = read_section(value, inner, parts)
                return raw if is_kept else found
        except (OmegaConfBaseException, RecursionError) as error:
            if isinstance(error, RecursionError) and not is_reference:
                raise  # to the reference to the section that contains it
            reason = _explain(error, known if len(problems) < MOST_PROBLEMS else ())
            is_missing = isinstance(error, MissingMandatoryValue)
            problems.append(Problem(key, reason if is_missing else f"is {shorten(raw)}; {reason}"))
            return None
        if key == _URI and isinstance(value, str):
            value = _VARIABLE.sub(lambda found: os.environ.get(found[1], found[2] or found[0]), value)
        if isinstance(value, str) and "${" in value and (wrong := _find_misplaced(value, raw, parts, is_kept=is_kept)):
            problems.append(Problem(key, wrong))
        return _DECODED.sub(_insert_number, raw) if is_kept else value

    return read_section(_create(prepare(tree, ""), {}), tree, ()), problems


def _create(tree: Any, runtime: Mapping[str, Any]) -> DictConfig:
    """Make a config of a tree and the run-time values; those that are not known yet are resolved to themselves."""
    with warnings.catch_warnings():  # OmegaConf 2.4 warns of this name; up to 2.3 the new name is another function
        warnings.simplefilter("ignore")
        OmegaConf.register_new_resolver("pipeline.env", _read_variable, replace=True)
        OmegaConf.register_new_resolver("pipeline.decode", _decode, replace=True)
    return OmegaConf.create({**{name: runtime.get(name, f"\\{marker(name)}") for name in RUNTIME_VALUES}, **tree})


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_strings(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_map_strings(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def _use_own_resolvers(text: str, mode: _Mode) -> str:
    return _OWN.sub(rf"\1pipeline.\2:{mode},", text)


def _use_public_resolvers(text: str) -> str:
    return re.sub(r"pipeline\.(env|decode):(?:read|fill),", r"oc.\1:", text)


def _read_variable(mode: _Mode, name: str, *default: Any) -> str | None:
    """Resolve ``${oc.env:NAME,default}``."""
    value = os.environ.get(name)
    if mode == "show" or (mode == "read" and is_secret(name)) or (value is None and not default):
        return f"${{oc.env:{','.join((name, *map(str, default)))}}}"
    if value is None:
        return None if default[0] is None else str(default[0])
    if mode == "fill":
        _built_with[value] = f"${{oc.env:{name}}}"
    return value


def _decode(mode: _Mode, text: Any, _parent_: Any, _node_: Any) -> Any:  # noqa: ARG001 - each of our resolvers has it
    """Resolve ``${oc.decode:...}``; of what has stayed a reference nothing is known."""
    if isinstance(text, str) and "${" in text:
        return f"${{oc.decode:{text}}}"
    return oc.decode(None if text is None else str(text), _parent_, _node_)


def _insert_number(found: re.Match[str]) -> str:
    value = os.environ.get(found[1], "")
    return value if _NUMBER.fullmatch(value) and not is_secret(found[1]) else found[0]


def _keeps_references(parts: tuple[keys.Part, ...]) -> bool:
    """Return True for arguments of components, tags, and the values of a sweep's parameter that is one of these."""
    if parts[:2] == ("sweep", "parameters") and len(parts) > 3 and parts[3] in ("grid", "choice"):
        try:
            parts = (*keys.split(str(parts[2])), *parts[5:])
        except ValueError:  # reported as a problem of the sweep
            return False
    return parts[:2] == ("tracking", "tags") or is_argument(parts)


def _find_misplaced(value: str, raw: Any, parts: tuple[keys.Part, ...], *, is_kept: bool) -> str:
    """Return what is wrong with a value that has references after all are resolved; empty if nothing is."""
    found = _UNKNOWN.search(value)
    if is_kept:
        if found and found[1] in RUNTIME_VALUES[:2] and parts[0] in ("data", "sampler", "loader"):
            return f"{marker(found[1])} has no value until the data is loaded. Use a number instead."
        return ""
    if found is not None and found[1]:
        early = f"{marker(found[1])} has no value until the data is loaded"
        return f"{early}. Use it only in the arguments of scheduler, optimizer and other components."
    if found is None or (found[2] in os.environ and not is_secret(found[2])):
        return f"is {shorten(raw)}. Only arguments of components may contain ${{ after all references are resolved."
    if is_secret(found[2]) and keys.join(parts) != _URI:
        return f"{found[2]} is a secret by its name, but this key is stored in files. Rename the variable."
    return f"is {shorten(raw)}; {explain_unset(found[2])}"


def _explain(error: Exception, known: Any) -> str:
    """Explain why a value can't be resolved."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, MissingMandatoryValue):
        return "has no value (???). Set a value."
    if isinstance(error, RecursionError):
        return "it refers to itself"
    if isinstance(error, UnsupportedInterpolationType):
        return "this resolver does not exist. Use ${section.key}, or ${oc.env:NAME}."
    missing = re.fullmatch(r"Interpolation key '(.*)' not found", text)
    if isinstance(error, InterpolationKeyError) and missing:
        if missing[1] in os.environ:
            return f"there is no key {missing[1]}. Write ${{oc.env:{missing[1]}}} for the environment variable."
        is_short = len(missing[1]) <= _LONGEST
        near = did_you_mean(missing[1], [*known, *RUNTIME_VALUES]) if known and is_short else ""
        return f"there is no key {missing[1][:_LONGEST]}{near}"
    return (text.partition("while resolving interpolation: ")[2] or text)[:_LONGEST]
