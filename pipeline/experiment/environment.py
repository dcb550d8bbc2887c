"""References to environment variables: ``${oc.env:NAME}`` in an argument is written as it is, never its value.

Any variable may hold a password, whatever its name is. An `Experiment` therefore holds the reference, and a component
receives the value when it is built. A number is no secret, so it replaces its reference when the file is read.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import keys

_SECRET_NAME = re.compile(r"\w*(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_\w*)?", re.IGNORECASE)
REFERENCE = re.compile(r"(?<!\\)\$\{oc\.env:([^\s{},']+)(?:,(?:'((?:[^'\\]|\\.)*)'|([^{},']*)))?\}", re.DOTALL)
"""A reference as `read` returns it: the name, and the default in quotes or without."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_UNQUOTED = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_./][\w./@+-]*", re.IGNORECASE)
"""Texts that OmegaConf reads as themselves."""
_SHORTEST, _COMMON = 4, ("true", "false", "none", "null")
"""Length of the shortest value that is searched for in messages, and values that occur in ordinary ones."""

_built_with: dict[str, str] = {}
"""References by the values that components of this process received."""


def is_secret(name: str) -> bool:
    """Return True if a variable is a secret by its name, which no key outside of components may show."""
    return _SECRET_NAME.fullmatch(name) is not None


def read(name: str, *default: Any, keeps: bool) -> str | None:
    """Return a variable's value as a file refers to it, or the reference.

    Args:
        name: name of the variable.
        default: nothing, or the default in the file, which may be None.
        keeps: True to return the reference, unless the value is a number and no secret by its name.

    Raises:
        KeyError: the variable is not set and has no default.
    """
    value = os.environ.get(name, *(None if each is None else str(each) for each in default))
    if keeps and not (value is not None and _NUMBER.fullmatch(value) and not is_secret(name)):
        if "${" not in str(default):
            return f"${{oc.env:{','.join((name, *map(_written, default)))}}}"
        if name in os.environ:  # the default, which refers to another variable, isn't used
            return f"${{oc.env:{name}}}"
    if value is None and not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return value


def _written(default: Any) -> str:
    """Return a default in OmegaConf's grammar; there, a backslash escapes only before a quote."""
    if not isinstance(default, str):
        return {None: "null", True: "true", False: "false"}.get(default, str(default))
    if _UNQUOTED.fullmatch(default):
        return default
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), default)
    return f"'{escaped}'"


def resolve_references(text: str) -> str | None:
    """Replace the references in a text by this process's variables; raise KeyError like `read`."""
    for found in REFERENCE.finditer(text):
        if _is_missing(found):
            raise KeyError(f"Environment variable '{found[1]}' not found")
    if (whole := REFERENCE.fullmatch(text)) and whole[3] == "null" and whole[1] not in os.environ:
        return None
    return REFERENCE.sub(lambda found: os.environ.get(found[1], _default(found)), text)


def fill_in(text: str, *, key: str) -> str | None:
    """Replace the references in an argument of a component, whose values `redact` then replaces.

    Returns None for a lone reference whose default ``null`` is used.

    Raises:
        ExperimentError: a variable is not set in this process and has no default.
    """
    for found in REFERENCE.finditer(text):
        name = found[1]
        if _is_missing(found):
            decoded = f", or write ${{oc.decode:{found[0]}}} to send and show the value"
            raise ExperimentError.of(
                key,
                f"the environment variable {name} is not set on {os.uname().nodename}, where the worker runs. Its "
                f"value is not sent there. Set it on each node{'' if is_secret(name) else decoded}",
            )
        if name in os.environ:
            _built_with[os.environ[name]] = f"${{oc.env:{name}}}"
    return resolve_references(text)


def fill_in_all(value: Any, *, key: str) -> Any:
    """Replace the references in all texts of a value; raise like `fill_in`."""
    if isinstance(value, str):
        return fill_in(value, key=key)
    if isinstance(value, Mapping):
        return {name: fill_in_all(inner, key=keys.child(key, name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [fill_in_all(inner, key=keys.child(key, index)) for index, inner in enumerate(value)]
    return value


def _is_missing(found: re.Match[str]) -> bool:
    return found[1] not in os.environ and found[2] is None and found[3] is None


def _default(found: re.Match[str]) -> str:
    if found[2] is None:
        return found[3] or ""
    return re.sub(r"(\\+)('|\Z)", lambda part: "\\" * (len(part[1]) // 2) + part[2], found[2])


def unset(arguments: object, *, key: str) -> Iterator[Problem]:
    """Find arguments that refer to variables that are not set here. Secrets may be set on the workers' nodes alone.

    Components of ``tracking`` are built here.
    """
    is_built_here = key.startswith("tracking.")
    for parts, text in keys.walk(arguments):
        for found in REFERENCE.finditer(text) if isinstance(text, str) else ():
            if _is_missing(found) and (is_built_here or not is_secret(found[1])):
                message = (
                    f"the environment variable {found[1]} is not set. Set it, or write ${{oc.env:{found[1]},default}}."
                )
                where = keys.join((key, *parts)) if parts else key
                yield Problem(where, f"is {text!r}; {message}")


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
