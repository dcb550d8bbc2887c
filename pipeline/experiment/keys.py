"""Dotted keys such as "train.epochs" and "benchmark.baseline.strategy", and their parts."""

import re
from collections.abc import Iterable, Iterator, Mapping

from pipeline.errors import Problem

Part = str | int

_WHOLE = re.compile(r"[^\s.\[\]=]+(\.[^\s.\[\]=]+|\[\d{1,9}\])*")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_OF_SINGLE = re.compile(r"^(optimizer|scheduler)(?=[.\[]|$)")
_DOTTED_INDEX = re.compile(r"\.(\d+)(?=[.\[]|$)")


def child(key: str, part: Part) -> str:
    """Return the key of an entry of the section or list at ``key``; "" is the top level."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}" if key else part


def join(parts: Iterable[Part]) -> str:
    """Return the dotted key of a path, e.g. "betas[0].x" for ("betas", 0, "x")."""
    key = ""
    for part in parts:
        key = child(key, part)
    return key


def walk(value: object, parts: tuple[Part, ...] = ()) -> Iterator[tuple[tuple[Part, ...], object]]:
    """Yield a tree's values with their paths, each section and list before what it holds."""
    yield parts, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in items:
        yield from walk(inner, (*parts, name))


def split(key: str) -> tuple[Part, ...]:
    """Return the parts of a key; indices in brackets become integers."""
    if not _WHOLE.fullmatch(key):
        raise ValueError(key)
    return tuple(int(index) if index else name for index, name in _PART.findall(key))


def ancestors(key: str) -> Iterator[str]:
    """Yield the key itself, then each section around it, innermost first; "betas.0" counts as "betas[0]"."""
    yield key
    key = _DOTTED_INDEX.sub(r"[\1]", key)
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]


def own_key(key: str, name: str) -> str:
    """Return a key of one of several optimizers, e.g. "optimizers.critic.lr" for "optimizer.lr"."""
    return _OF_SINGLE.sub(rf"\1s.{name}", key) if name else key


def own_problems(problems: Iterable[Problem], name: str) -> list[Problem]:
    """Return problems with the keys of one of several optimizers."""
    return [problem._replace(key=own_key(problem.key, name)) for problem in problems]
