"""YAML of experiment files: values with the line of each key.

PyYAML reads YAML 1.1. Here 1e-3 is a number, and a date or a time such as 10:30 is a string. What YAML 1.2 reads
differently (010, no), and what may be the hash of a commit (695e0514), is a problem.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import keys

_TAG = "tag:yaml.org,2002:"
_STRING, _MERGE = f"{_TAG}str", f"{_TAG}merge"
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_TIME = re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_AMBIGUOUS = re.compile(
    r"[-+]?0[0-7_]+|[-+]?0b[01_]+|[-+.]?[0-9].*_.*|yes|no|on|off|0[0-9]+e[0-9]+|(?=.{5})[0-9]+e[0-9]+", re.IGNORECASE
)
_BREAK = re.compile("[\x85\u2028\u2029]")  # Characters that end a line in YAML unless they are escaped
_KINDS = {_STRING: "a string that UTF-8 can encode", f"{_TAG}int": "an integer of at most 64 bits"} | {
    f"{_TAG}{name}": name for name in ("float", "bool", "null")
}
_COLOR_OR_MARK = re.compile(r"[ \t]*(#(?:[0-9a-fA-F]{3,8})?)[ \t]*[\n\0]")
"""Comment in the place of a value that is probably the value."""
_DEEPEST, _MOST_VALUES = 40, 50_000
"""Limits of a file: OmegaConf needs many stack frames for each level, and aliases of aliases grow exponentially."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    known = yaml.SafeLoader.yaml_implicit_resolvers
    ours = {sign: [one for one in entries if one[0] != f"{_TAG}timestamp"] for sign, entries in known.items()}
    numbers = {sign: [(_STRING, _TIME), *ours.get(sign, ()), (f"{_TAG}float", _EXPONENT)] for sign in "-+0123456789"}
    return ours | numbers


class Loader(yaml.SafeLoader):
    """Loader of experiment files and of override values."""

    yaml_implicit_resolvers = _resolvers()


class Dumper(yaml.SafeDumper):
    """Dumper whose output `Loader` reads back unchanged."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: object) -> bool:
        """Write repeated values in full instead of as aliases, for readability."""
        return True


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_STRING, text, style='"' if _BREAK.search(text) else None)
)


def format_value(value: object) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)  # 1e-06; PyYAML writes 1.0e-06
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def parse(
    text: str, *, place: Callable[[int], str], depth: int = 0, in_shell: bool = False
) -> tuple[Any, dict[str, int], list[Problem]]:
    """Parse a YAML document; return its value (None if it is empty), the line of every key, and problems of values."""
    reader = _Reader(place, in_shell=in_shell)
    try:
        node = yaml.compose(text, Loader=Loader)
        if in_shell and text[node.end_mark.index if node else 0 :].lstrip().startswith("#"):
            message = f"# starts a comment in YAML. Put the value in quotes: {reader.quote(text)}"
            raise ExperimentError([Problem("", message, place(1))])
        if in_shell and node is None:
            raise ExperimentError([Problem("", "has no value. Write null for none, or \"''\" for an empty text.")])
        value = None if node is None else reader.read(node, "", depth)
    except yaml.YAMLError as error:
        message, line = _explain_syntax(error, text)
        raise ExperimentError([Problem("", message, place(line))]) from None
    except RecursionError:
        raise ExperimentError([Problem("", f"nested deeper than {_DEEPEST} levels", place(1))]) from None
    if in_shell and reader.problems:
        raise ExperimentError(reader.problems)
    return value, reader.lines, reader.problems


class _Reader:
    """Conversion of YAML nodes to plain values; merge keys (``<<``) and aliases are expanded."""

    def __init__(self, place: Callable[[int], str], *, in_shell: bool) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._place, self._in_shell = place, in_shell
        self._values = 0

    def quote(self, text: str) -> str:
        """Return a text as YAML in quotes, as it is written here."""
        inner = "'" + text.replace("'", "''") + "'"
        return f'"{inner}"' if self._in_shell else inner

    def read(self, node: yaml.Node, key: str, depth: int) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise ExperimentError([Problem("", f"more than {_MOST_VALUES} values", self._place(1))])
        if depth > _DEEPEST:
            raise RecursionError
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._read_mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            found = []
            for n, item in enumerate(node.value):
                self.lines[keys.child(key, n)] = item.start_mark.line + 1
                found.append(self.read(item, keys.child(key, n), depth + 1))
            return found
        value = self._read_scalar(node, key)
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and not isinstance(value, str)
        if is_plain and _AMBIGUOUS.fullmatch(node.value):
            meant = f"Write {format_value(value)}, or {self.quote(node.value)} for the text."
            self._add(key, f"is {node.value}, which YAML 1.1 reads as {format_value(value)}. {meant}", node)
        mark = node.start_mark
        if not node.value and mark.buffer and (comment := _COLOR_OR_MARK.match(mark.buffer, mark.pointer)):
            self._add(key, f"is empty, since # starts a comment. Write {self.quote(comment[1])}, or null.", node)
        return value

    def _read_mapping(self, node: yaml.MappingNode, key: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for name, value in node.value:
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources) if name.tag == _MERGE else ():  # the earlier one wins
                if isinstance(source, yaml.MappingNode):
                    result |= self.read(source, key, depth + 1) or {}
                else:
                    self._add(key, "<<: takes a mapping, e.g. <<: *defaults", value)
        for name, value in node.value:
            if name.tag == _MERGE:
                continue
            # Metrics have a key "on", which is a boolean in YAML 1.1.
            is_on = isinstance(name, yaml.ScalarNode) and name.value == "on"
            text = "on" if is_on else self._read_scalar(name, key) if isinstance(name, yaml.ScalarNode) else None
            if not isinstance(text, str):
                shown = name.value if isinstance(name, yaml.ScalarNode) else "..."
                self._add(key, f"the key {shown} is not a string; put it in quotes", name)
                continue
            inner = keys.child(key, text)
            if text in first:
                self._add(inner, f"set twice, first in line {first[text]}. Remove one of them.", name)
                continue
            self.lines[inner] = first[text] = name.start_mark.line + 1
            if node.flow_style and name.style is None and ":" in text and not value.value:
                self._add(inner, f"has no value. Put a space after the colon: {text.replace(':', ': ', 1)}", name)
            result[text] = self.read(value, inner, depth + 1)
        return result

    def _read_scalar(self, node: yaml.Node, key: str) -> Any:
        if node.tag not in _KINDS:
            self._add(key, f"the YAML tag {node.tag.replace(_TAG, '!!')} is not supported. Remove it.", node)
            return None
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
            str(value).encode()  # a lone surrogate fails, and an integer of 4300 digits
            if not isinstance(value, int) or value.bit_length() <= 64:
                return value
        except (yaml.YAMLError, ValueError, KeyError):
            pass
        self._add(key, f"{str(node.value)[:40]!r} is not {_KINDS[node.tag]}; put strings in quotes", node)
        return None

    def _add(self, key: str, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(key, message, self._place(node.start_mark.line + 1)))


def _explain_syntax(error: yaml.YAMLError, text: str) -> tuple[str, int]:
    """Return the message for an error of PyYAML, and its line."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return "a character that is not allowed in text files. Save the file as UTF-8 text.", line
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"can't be read as YAML: {error}", 1
    mark = error.problem_mark or error.context_mark
    if mark is not None and mark.buffer is not None and mark.buffer[: mark.pointer + 1].endswith("${"):
        return 'inside {} and [] a ${...} needs quotes; write "${...}"', mark.line + 1
    start = f" (line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
    whole = ": ".join(filter(None, (f"{error.context or ''}{start}", error.problem)))
    return f"can't be read as YAML: {whole}", mark.line + 1 if mark else 1
