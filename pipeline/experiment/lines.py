"""YAML parser that records the line of every key, and explains syntax errors in plain words."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import keys
from pipeline.experiment.dialect import Loader, is_ambiguous, written
from pipeline.experiment.uris import without_credentials_in

PlaceOf = Callable[[int], str]
"""Maps a line, counted from 1, to the place that a problem shows."""

COMMAND_LINE = "command line: "
"""Prefix of a problem's place if an override caused it."""

_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
_COLLECTIONS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq")}
_MERGE = "tag:yaml.org,2002:merge"
_KINDS = {f"tag:yaml.org,2002:{name}": name for name in ("float", "bool", "null")}
_KINDS["tag:yaml.org,2002:int"] = "an integer of at most 64 bits"
_KINDS["tag:yaml.org,2002:str"] = "a string that UTF-8 can encode"
_MOST_BITS = 64
_LONGEST = 200  # characters of an override in a message
_MOST_VALUES = 50_000
_DEEPEST = 40  # OmegaConf takes some ten of Python's thousand stack frames for each level
_COLOR_OR_MARK = re.compile(r"[ \t]*(#(?:[0-9a-fA-F]{3,8})?)[ \t]*[\n\0]")
"""Comment in the place of a value that is probably the value."""
_TAB = re.compile(r"^ *\t[ \t]*\S")

_MEANINGS = (
    ("mapping values are not allowed", "an unexpected colon. Indent less, or put a string with ': ' in quotes."),
    ("could not find expected ':'", "a line without a colon; write key: value"),
    ("but found '<scalar>'", "an unexpected value. Check for a missing comma, quote or line break before it."),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    (
        "expected <block end>",
        "the indentation does not match a section above. Start all keys of a section in the same column.",
    ),
    ("while scanning a quoted scalar", "a quote is not closed"),
    ("undefined alias", "*name refers to an anchor &name that is not defined before it"),
    ("duplicate anchor", "two anchors have the same name. Rename one of them."),
    ("expected '<document start>'", "unexpected text after the end. Remove the extra closing bracket."),
    ("expected a single document", "a second document after ---. A file contains one experiment."),
    ("unknown escape character", "an unknown escape in a string. Put strings with a backslash in single quotes."),
    ("that cannot start any token", "a string cannot start with this character. Put it in quotes."),
    ("expected the node content", "a value is missing, or there is an unexpected bracket, comma or colon"),
    ("did not find expected", "an unexpected bracket, comma or colon"),
)


class Line(NamedTuple):
    """Line of a file, counted from 1."""

    file: str
    """Path of the file, as the user wrote it."""
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Places:
    """Origin of each key: its line in a file, or the override that set it."""

    name: str
    """Path of the file, as the user wrote it."""
    entries: Mapping[str, Line | str]

    def locate(self, key: str) -> str:
        """Return "file:line" of a key or of the nearest section around it, or "command line: train.epochs=3"."""
        entry = self.entries.get(self._known(key))
        if isinstance(entry, str):
            return of_override(entry)
        return str(entry or self.name)

    def sorted(self, problems: Iterable[Problem]) -> list[Problem]:
        """Sort problems by the order of their keys in the files, that of the experiment first, overrides last."""
        rank = {key: n for n, key in enumerate(self.entries, 1)}

        def order(problem: Problem) -> tuple[bool, bool, int]:
            known = self._known(problem.key)
            entry = self.entries.get(known)
            place = problem.place or self.locate(problem.key)
            is_in_base = isinstance(entry, Line) and entry.file != self.name
            return place.startswith(COMMAND_LINE), is_in_base, rank.get(known, 0)

        return sorted(problems, key=order)

    def _known(self, key: str) -> str:
        return next((near for near in keys.ancestors(key) if near in self.entries), "")


def of_override(override: str) -> str:
    """Return the place of a problem that an override caused."""
    override = without_credentials_in(override)
    return f"{COMMAND_LINE}{override if len(override) <= _LONGEST else f'{override[:_LONGEST]}...'}"


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
        raise ExperimentError(explain_syntax(error, text, place=place)) from None
    except RecursionError:
        raise ExperimentError([Problem("", f"nested deeper than {_DEEPEST} levels", place(1))]) from None
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
        self._constructor = yaml.constructor.SafeConstructor()

    def quote(self, text: str) -> str:
        """Return a text as YAML in quotes, as it is written here."""
        inner = "'" + text.replace("'", "''") + "'"
        return f'"{inner}"' if self._in_shell else inner

    def value(self, node: yaml.Node, key: str, *, depth: int) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES or depth > _DEEPEST:  # also stops aliases of aliases, which grow exponentially
            what = f"more than {_MOST_VALUES} values" if depth <= _DEEPEST else f"nested deeper than {_DEEPEST} levels"
            raise ExperimentError([self._problem(key, what, node)])
        if isinstance(node, yaml.MappingNode) and node.tag in _COLLECTIONS:
            return self._mapping(node, key, depth=depth)
        if isinstance(node, yaml.SequenceNode) and node.tag in _COLLECTIONS:
            return [self._entry(item, keys.child(key, i), item, depth=depth) for i, item in enumerate(node.value)]
        value = self._scalar(node, key)
        if isinstance(node, yaml.ScalarNode) and (message := self._find_misreading(node, value)):
            self.problems.append(self._problem(key, message, node))
        return value

    def _find_misreading(self, node: yaml.ScalarNode, value: object) -> str:
        """Return what is wrong with a scalar that YAML reads as another value than most people expect; empty if OK."""
        if is_ambiguous(node):
            other = f"Write {written(value)}, or {self.quote(node.value)} for the text."
            return f"is {node.value}, which is {written(value)} in YAML 1.1 and not in YAML 1.2. {other}"
        mark = node.start_mark
        is_empty = value is None and node.value == "" and mark.buffer is not None
        if is_empty and (comment := _COLOR_OR_MARK.match(mark.buffer or "", mark.pointer)):
            return f"is empty, since # starts a comment. Write {self.quote(comment[1])}, or null."
        return ""

    def _entry(self, node: yaml.Node, key: str, at: yaml.Node, *, depth: int) -> Any:
        self.lines[key] = at.start_mark.line + 1
        return self.value(node, key, depth=depth + 1)

    def _mapping(self, node: yaml.MappingNode, key: str, *, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in node.value:
            if name.tag == _MERGE:
                result |= self._merged(value, key, depth=depth)
        first: dict[str, int] = {}
        for name, value in node.value:
            if name.tag == _MERGE or (text := self._name(name, key)) is None:
                continue
            if text in first:
                message = f"set twice, first in line {first[text]}. Remove one of them."
                self.problems.append(self._problem(keys.child(key, text), message, name))
                continue
            first[text] = name.start_mark.line + 1
            if node.flow_style and name.style is None and ":" in text and not value.value:
                message = f"has no value. Put a space after the colon: {text.replace(':', ': ', 1)}"
                self.problems.append(self._problem(keys.child(key, text), message, name))
            result[text] = self._entry(value, keys.child(key, text), name, depth=depth)
        return result

    def _merged(self, node: yaml.Node, key: str, *, depth: int) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for source in reversed(sources):  # YAML: the earlier one wins
            if not isinstance(source, yaml.MappingNode):
                self.problems.append(self._problem(key, "<<: takes a mapping, e.g. <<: *defaults", node))
                continue
            result |= self.value(source, key, depth=depth + 1) or {}
        return result

    def _name(self, node: yaml.Node, section: str) -> str | None:
        text = self._scalar(node, section) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(text, str):
            return text
        if isinstance(node, yaml.ScalarNode) and node.value == "on":  # in YAML 1.1 a boolean, and no key is one
            return "on"
        written = node.value if isinstance(node, yaml.ScalarNode) else "..."
        message = f"the key {written} is not a string; put it in quotes"
        self.problems.append(self._problem(section, message, node))
        return None

    def _scalar(self, node: yaml.Node, key: str) -> Any:
        if node.tag not in _SCALARS:
            self.problems.append(
                self._problem(key, f"the YAML tag {_short(node.tag)} is not supported. Remove it.", node)
            )
            return None
        try:
            return _usable(self._constructor.construct_object(node))
        except (yaml.YAMLError, ValueError, KeyError, OverflowError):
            message = f"{node.value[:40]!r} is not {_KINDS.get(node.tag, _short(node.tag))}; put strings in quotes"
            self.problems.append(self._problem(key, message, node))
            return None

    def _problem(self, key: str, message: str, node: yaml.Node) -> Problem:
        return Problem(key, message, self._place(node.start_mark.line + 1))


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _usable(value: Any) -> Any:
    """Return the value unchanged.

    Raises:
        OverflowError: an integer of more than 64 bits; Python can't even print one of 4300 digits.
        ValueError: a lone surrogate from a YAML escape, which UTF-8 can't encode.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise OverflowError
    if isinstance(value, str):
        value.encode()
    return value


def explain_syntax(error: yaml.YAMLError, text: str, *, place: Callable[[int], str]) -> list[Problem]:
    """Explain an error of PyYAML; tabs are the usual reason, so they are looked for first."""
    if tabs := [number for number, line in enumerate(text.split("\n"), 1) if _TAB.match(line)]:
        return [Problem("", "a tab in the indentation; use spaces", place(number)) for number in tabs]
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return [Problem("", "a character that is not allowed in text files. Save the file as UTF-8 text.", place(line))]
    if isinstance(error, yaml.MarkedYAMLError):
        return [Problem("", _meaning(error), place(_line(error)))]
    return [Problem("", f"can't be read as YAML: {error}", place(1))]


def _meaning(error: yaml.MarkedYAMLError) -> str:
    if _is_bare_interpolation(error.problem_mark):
        return 'inside {} and [] a ${...} needs quotes; write "${...}"'
    said = f"{error.context or ''}: {error.problem or ''}"
    meaning = next((meaning for sign, meaning in _MEANINGS if sign in said), None)
    return meaning or f"can't be read as YAML: {error.problem or error.context}"


def _line(error: yaml.MarkedYAMLError) -> int:
    """Return the line to show: for brackets and quotes left open the opening one, otherwise where parsing stopped."""
    open_ended = any(what in (error.context or "") for what in ("quoted scalar", "flow", "simple key"))
    open_ended = open_ended and not _is_bare_interpolation(error.problem_mark)
    mark = (open_ended and error.context_mark) or error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _is_bare_interpolation(mark: yaml.Mark | None) -> bool:
    return mark is not None and mark.buffer is not None and mark.buffer[: mark.pointer + 1].endswith("${")
