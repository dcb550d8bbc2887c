"""What a YAML parser's complaint means, in words that need no knowledge of YAML parsers."""

import re
from collections.abc import Callable

import yaml

from pipeline.errors import Problem

_TAB = re.compile(r"^ *\t[ \t]*\S")

_MEANINGS = (
    ("mapping values are not allowed", "a colon where none belongs; indent less, or put a text with ': ' in quotes"),
    ("could not find expected ':'", "a line without a colon; write key: value"),
    ("but found '<scalar>'", "a text where an entry ends; is a comma, a quote or a line break missing before it?"),
    ("expected ',' or", "a bracket that is not closed, or a comma that is missing"),
    ("expected <block end>", "the indentation fits no section above; begin the keys of a section in one column"),
    ("while scanning a quoted scalar", "a quote that is not closed"),
    ("undefined alias", "*name refers to an anchor &name, and there is none before it"),
    ("duplicate anchor", "two anchors of the same name"),
    ("expected '<document start>'", "something stands after the end; remove a closing bracket too many"),
    ("expected a single document", "a second document after ---; a file holds one experiment"),
    ("unknown escape character", "an unknown escape in a text; put texts with a backslash in single quotes"),
    ("that cannot start any token", "a text can't begin with this character; put it in quotes"),
    ("expected the node content", "a value is missing, or a bracket, comma or colon stands where none belongs"),
    ("did not find expected", "a bracket, comma or colon stands where none belongs"),
)


def explain_syntax(error: yaml.YAMLError, text: str, *, place: Callable[[int], str]) -> list[Problem]:
    """Problems for an error of PyYAML; tabs are the usual reason, so they are looked for first."""
    if tabs := [number for number, line in enumerate(text.split("\n"), 1) if _TAB.match(line)]:
        return [Problem("", "a tab in the indentation; use spaces", place(number)) for number in tabs]
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return [Problem("", "a character that can't stand in a text file; save the file as UTF-8 text", place(line))]
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
    """Where to look: what is never closed is at fault where it opens, anything else where reading stopped."""
    open_ended = any(what in (error.context or "") for what in ("quoted scalar", "flow", "simple key"))
    open_ended = open_ended and not _is_bare_interpolation(error.problem_mark)
    mark = (open_ended and error.context_mark) or error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1


def _is_bare_interpolation(mark: yaml.Mark | None) -> bool:
    return mark is not None and mark.buffer is not None and mark.buffer[: mark.pointer + 1].endswith("${")
