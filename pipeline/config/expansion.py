"""How long values become once every ``${...}`` is put in: a few lines that refer to each other can fill any memory."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property

LIMIT = 1_000_000
"""Characters of one value; an experiment has some thousand in all."""
_VALUE = 100
"""What each value of a section counts for beside its text, since it takes that much longer to put in."""
_REFERENCE = re.compile(r"\$\{\s*([^${}:]+?)\s*\}")
_INDEX = re.compile(r"\[(\w+)\]")


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
