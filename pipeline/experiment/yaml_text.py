"""YAML of experiment files: values with the line of each key, and syntax errors in plain words.

PyYAML reads YAML 1.1. Here 1e-3 is a number, and a date or a time such as 10:30 is a string. What YAML 1.2 reads
differently (010, no) is a problem, and so is a comment in the place of a value.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import keys

PlaceOf = Callable[[int], str]
"""Function from a line, counted from 1, to the place that a problem shows."""

_TAG = "tag:yaml.org,2002:"
_STRING = f"{_TAG}str"
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_TIME = re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_ONLY_1_1 = re.compile(r"[-+]?0[0-7_]+|[-+]?0b[01_]+|[-+.]?[0-9].*_.*|yes|no|on|off", re.IGNORECASE)
_HASH = re.compile(r"0[0-9]+[eE][0-9]+|(?=.{5})[0-9]+[eE][0-9]+")
"""Number that is probably the hash of a commit, such as 695e0514."""
_BREAK = re.compile("[\x85\u2028\u2029]")
"""Characters that end a line in YAML unless they are escaped."""
_KINDS = {
    _STRING: "a string that UTF-8 can encode",
    f"{_TAG}int": "an integer of at most 64 bits",
    **{f"{_TAG}{name}": name for name in ("float", "bool", "null")},
}
_MOST_VALUES = 50_000  # aliases of aliases grow exponentially
_DEEPEST = 40  # OmegaConf takes some ten of Python's thousand stack frames for each level
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"
_COLOR_OR_MARK = re.compile(r"[ \t]*(#(?:[0-9a-fA-F]{3,8})?)[ \t]*[\n\0]")
"""Comment in the place of a value that is probably the value."""
_TAB = re.compile(r"^ *\t[ \t]*\S")
_MEANINGS = {
    "mapping values are not allowed": "an unexpected colon. Indent less, or put a string with ': ' in quotes.",
    "could not find expected ':'": "a line without a colon; write key: value",
    "but found '<scalar>'": "an unexpected value. Check for a missing comma, quote or line break before it.",
    "expected ',' or": "a bracket is not closed, or a comma is missing",
    "expected <block end>": "the indentation does not match a section above. Start all keys of a section in the same "
    "column.",
    "while scanning a quoted scalar": "a quote is not closed",
    "undefined alias": "*name refers to an anchor &name that is not defined before it",
    "duplicate anchor": "two anchors have the same name. Rename one of them.",
    "expected '<document start>'": "unexpected text after the end. Remove the extra closing bracket.",
    "expected a single document": "a second document after ---. A file contains one experiment.",
    "unknown escape character": "an unknown escape in a string. Put strings with a backslash in single quotes.",
    "that cannot start any token": "a string cannot start with this character. Put it in quotes.",
    "expected the node content": "a value is missing, or there is an unexpected bracket, comma or colon",
    "did not find expected": "an unexpected bracket, comma or colon",
}
"""What errors of PyYAML mean, by a part of their text; the first that fits."""


def _resolvers(*first: tuple[str, re.Pattern[str]]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    known = yaml.SafeLoader.yaml_implicit_resolvers
    ours = {sign: [one for one in entries if one[0] != f"{_TAG}timestamp"] for sign, entries in known.items()}
    return ours | {sign: [*first, *ours.get(sign, ()), (f"{_TAG}float", _EXPONENT)] for sign in "-+0123456789"}


class Loader(yaml.SafeLoader):
    """Loader of experiment files and of override values."""

    yaml_implicit_resolvers = _resolvers((_STRING, _TIME))


class Dumper(yaml.SafeDumper):
    """Dumper whose output `Loader` reads back unchanged."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: object) -> bool:
        """Write repeated values in full instead of as aliases, for readability."""
        return True


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_STRING, text, style='"' if _BREAK.search(text) else None)
)


def written(value: object) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)  # 1e-06; PyYAML writes 1.0e-06
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def parse(text: str, *, place: PlaceOf, depth: int = 0, in_shell: bool = False) -> tuple[Any, dict[str, int]]:
    """Parse a YAML document; return its value (None if it is empty) and the line of every key.

    Args:
        text: the document.
        place: returns the place of a line in messages.
        depth: number of sections around the value.
        in_shell: True for a value on a command line, where messages double the quotes and a comment is an error.

    Raises:
        ExperimentError: not YAML, duplicate keys, keys that aren't strings, tags, or too many values or levels.
    """
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ExperimentError(_explain_syntax(error, text, place=place)) from None
    except RecursionError:
        raise ExperimentError([Problem("", _TOO_DEEP, place(1))]) from None
    reader = _Reader(place, in_shell=in_shell)
    if in_shell and text[node.end_mark.index if node else 0 :].lstrip().startswith("#"):
        message = f"# starts a comment in YAML. Put the value in quotes: {reader.quote(text)}"
        raise ExperimentError([Problem("", message, place(1))])
    value = None if node is None else reader.value(node, "", depth=depth)
    if reader.problems:
        raise ExperimentError(reader.problems)
    return value, reader.lines


class _Reader:
    """Conversion of YAML nodes to plain values; merge keys (``<<``) and aliases are expanded."""

    def __init__(self, place: PlaceOf, *, in_shell: bool) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._place, self._in_shell = place, in_shell
        self._values = 0

    def quote(self, text: str) -> str:
        """Return a text as YAML in quotes, as it is written here."""
        inner = "'" + text.replace("'", "''") + "'"
        return f'"{inner}"' if self._in_shell else inner

    def value(self, node: yaml.Node, key: str, *, depth: int) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES or depth > _DEEPEST:
            self._add(key, _TOO_DEEP if depth > _DEEPEST else f"more than {_MOST_VALUES} values", node)
            raise ExperimentError(self.problems[-1:])
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, key, depth=depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._entry(item, keys.child(key, n), item, depth=depth) for n, item in enumerate(node.value)]
        value = self._scalar(node, key)
        if not isinstance(node, yaml.ScalarNode) or node.style is not None or isinstance(value, str):
            return value
        if _ONLY_1_1.fullmatch(node.value):
            either = f"Write {written(value)}, or {self.quote(node.value)} for the text."
            self._add(
                key, f"is {node.value}, which is {written(value)} in YAML 1.1 and not in YAML 1.2. {either}", node
            )
        if _HASH.fullmatch(node.value):
            either = f"Write {written(value)}, or {self.quote(node.value)} for the text."
            self._add(key, f"is {node.value}, which is the number {written(value)} in YAML. {either}", node)
        mark = node.start_mark
        if not node.value and mark.buffer and (comment := _COLOR_OR_MARK.match(mark.buffer, mark.pointer)):
            message = f"is empty, since # starts a comment. Write {self.quote(comment[1])}, or null."
            self._add(key, message, node)
        return value

    def _entry(self, node: yaml.Node, key: str, at: yaml.Node, *, depth: int) -> Any:
        self.lines[key] = at.start_mark.line + 1
        return self.value(node, key, depth=depth + 1)

    def _mapping(self, node: yaml.MappingNode, key: str, *, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for name, value in node.value:
            if name.tag == f"{_TAG}merge":
                result |= self._merged(value, key, depth=depth)
        for name, value in node.value:
            if name.tag == f"{_TAG}merge" or (text := self._name(name, key)) is None:
                continue
            inner = keys.child(key, text)
            if text in first:
                self._add(inner, f"set twice, first in line {first[text]}. Remove one of them.", name)
                continue
            first[text] = name.start_mark.line + 1
            if node.flow_style and name.style is None and ":" in text and not value.value:
                message = f"has no value. Put a space after the colon: {text.replace(':', ': ', 1)}"
                self._add(inner, message, name)
            result[text] = self._entry(value, inner, name, depth=depth)
        return result

    def _merged(self, node: yaml.Node, key: str, *, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for source in reversed(node.value if isinstance(node, yaml.SequenceNode) else [node]):  # the earlier one wins
            if isinstance(source, yaml.MappingNode):
                result |= self.value(source, key, depth=depth + 1) or {}
            else:
                self._add(key, "<<: takes a mapping, e.g. <<: *defaults", node)
        return result

    def _name(self, node: yaml.Node, section: str) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.value == "on":  # in YAML 1.1 a boolean, and no key is one
            return "on"
        text = self._scalar(node, section) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(text, str):
            return text
        shown = node.value if isinstance(node, yaml.ScalarNode) else "..."
        self._add(section, f"the key {shown} is not a string; put it in quotes", node)
        return None

    def _scalar(self, node: yaml.Node, key: str) -> Any:
        if node.tag not in _KINDS:
            self._add(key, f"the YAML tag {node.tag.replace(_TAG, '!!')} is not supported. Remove it.", node)
            return None
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
            str(value).encode()  # a lone surrogate fails, and an integer of 4300 digits
            is_right = not isinstance(value, int) or value.bit_length() <= 64
        except (yaml.YAMLError, ValueError, KeyError):
            is_right, value = False, None
        if not is_right:
            self._add(key, f"{str(node.value)[:40]!r} is not {_KINDS[node.tag]}; put strings in quotes", node)
        return value if is_right else None

    def _add(self, key: str, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(key, message, self._place(node.start_mark.line + 1)))


def _explain_syntax(error: yaml.YAMLError, text: str, *, place: PlaceOf) -> list[Problem]:
    """Explain an error of PyYAML; tabs are the usual reason, so they are looked for first."""
    if tabs := [number for number, line in enumerate(text.split("\n"), 1) if _TAB.match(line)]:
        return [Problem("", "a tab in the indentation; use spaces", place(number)) for number in tabs]
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return [Problem("", "a character that is not allowed in text files. Save the file as UTF-8 text.", place(line))]
    if not isinstance(error, yaml.MarkedYAMLError):
        return [Problem("", f"can't be read as YAML: {error}", place(1))]
    mark, context = error.problem_mark, error.context or ""
    if mark is not None and mark.buffer is not None and mark.buffer[: mark.pointer + 1].endswith("${"):
        return [Problem("", 'inside {} and [] a ${...} needs quotes; write "${...}"', place(mark.line + 1))]
    said = f"{context}: {error.problem or ''}"
    found = next((meaning for sign, meaning in _MEANINGS.items() if sign in said), None)
    if any(what in context for what in ("quoted scalar", "flow", "simple key")):  # left open: where it began
        mark = error.context_mark or mark
    mark = mark or error.context_mark
    message = found or f"can't be read as YAML: {error.problem or error.context}"
    return [Problem("", message, place(mark.line + 1 if mark else 1))]
