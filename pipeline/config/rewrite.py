"""Rewriting of an experiment file with keys of earlier versions: ``pipeline check --fix``; comments are kept."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import yaml

from pipeline.config import lines
from pipeline.config.dialect import Loader, written
from pipeline.config.renamed import KEYS, translate, translate_key
from pipeline.errors import ExperimentError

_INDENT = "  "


class _Edit(NamedTuple):
    """Replacement of the characters from ``start`` to ``end``."""

    start: int
    end: int
    text: str


class _Entry(NamedTuple):
    """Key of a section with its value."""

    key: yaml.ScalarNode
    value: yaml.Node


def rewrite(text: str, *, name: str) -> str:
    """Return the text of an experiment file with today's names of all keys.

    Args:
        text: the file's text.
        name: path of the file, for messages.

    Raises:
        ExperimentError: it isn't YAML, or its layout can't be kept.
    """
    before, _ = lines.parse(text, place=lambda line: f"{name}:{line}")
    if not isinstance(before, dict):
        return text
    after = deepcopy(before)
    translate(after)
    if after == before:
        return text
    result = text
    for edit in sorted(_Rewriter(text).iter_edits(), reverse=True):
        result = result[: edit.start] + edit.text + result[edit.end :]
    if not _is(after, result):
        old = ", ".join(f"{key} is now {new}" for key, new in KEYS.items() if _has(before, key))
        raise ExperimentError.of("", f"cannot be rewritten with its comments. Rename the keys by hand: {old}")
    return result


class _Rewriter:
    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._sections = _entries(yaml.compose(text, Loader=Loader))

    def iter_edits(self) -> Iterator[_Edit]:
        """Yield edits that do not overlap."""
        compare, measure = self._sections.get("compare"), self._sections.get("measure")
        block = list(self._iter_compare_lines(compare)) if compare else []
        if compare and measure and (comment := self._comment(measure).strip()):
            block.append(f"{_INDENT}{comment}\n")
        block += self._iter_measure_lines(measure) if measure else ()
        if first := compare or measure:
            yield self._replace_lines(first, f"benchmark:{self._comment(first)}\n" + "".join(block))
        if compare and measure:
            yield self._replace_lines(measure, "")
        if order := self._sections.get("order"):
            yield _rename(order.key, "sampler")
        yield from self._rename_in("parallel", "interface")
        yield from self._loggers()
        sweep = _entries(self._sections["sweep"].value) if "sweep" in self._sections else {}
        if "parameters" in sweep:
            for key, entry in _entries(sweep["parameters"].value).items():
                if (new := translate_key(key)) != key:
                    yield _rename(entry.key, new)

    def _rename_in(self, section: str, *names: str) -> Iterator[_Edit]:
        inside = _entries(self._sections[section].value) if section in self._sections else {}
        for name in names:
            if name in inside:
                yield _rename(inside[name].key, translate_key(f"{section}.{name}").rpartition(".")[2])

    def _loggers(self) -> Iterator[_Edit]:
        inside = _entries(self._sections["tracking"].value) if "tracking" in self._sections else {}
        also, trackers = inside.get("also"), inside.get("trackers")
        if also and trackers and also.value.start_mark.line != trackers.value.start_mark.line:
            values = [*_parse(self._source(also.value)), *_parse(self._dedent(trackers.value))]
            yield _Edit(also.key.start_mark.index, _end(also.value).index, f"loggers: {written(values)}")
            yield self._replace_lines(trackers, "")
        else:
            yield from self._rename_in("tracking", "also", "trackers")

    def _iter_compare_lines(self, entry: _Entry) -> Iterator[str]:
        """Yield the lines of the baseline and of the other configurations."""
        if not isinstance(entry.value, yaml.SequenceNode) or not entry.value.value:
            return
        first, *others = entry.value.value
        if entry.value.flow_style:
            comment = self._rest_of_line(entry.value.end_mark.index)
            yield f"{_INDENT}baseline: {self._source(first)}{comment}\n"
            if others:
                yield f"{_INDENT}configurations: [{', '.join(map(self._source, others))}]\n"
            return
        start, end, column = first.start_mark.line, _end(first).line + 1, first.start_mark.column
        text = [self._lines[start][column:], *(line[column:] for line in self._lines[start + 1 : end])]
        if isinstance(first, yaml.MappingNode) and not first.flow_style:
            yield f"{_INDENT}baseline:\n"
            yield from (_INDENT * 2 + line for line in text)
        else:
            yield f"{_INDENT}baseline: {''.join(text)}"
        if others:
            yield f"{_INDENT}configurations:\n"
            dash = self._lines[others[0].start_mark.line].index("-")
            yield from self._indent_lines(end, _end(entry.value).line + 1, column=dash, indent=_INDENT * 2)

    def _iter_measure_lines(self, entry: _Entry) -> Iterator[str]:
        """Yield the lines of the settings of the measurement."""
        inside = _entries(entry.value)
        if isinstance(entry.value, yaml.MappingNode) and entry.value.flow_style:
            for key, each in inside.items():
                yield f"{_INDENT}{translate_key(f'measure.{key}').rpartition('.')[2]}: {self._source(each.value)}\n"
            return
        text = list(self._lines)
        for key, each in inside.items():
            mark, new = each.key.start_mark, translate_key(f"measure.{key}").rpartition(".")[2]
            line = text[mark.line]
            text[mark.line] = line[: mark.column] + new + line[each.key.end_mark.column :]
        start, end = entry.key.start_mark.line + 1, _end(entry.value).line + 1
        yield from self._indent_lines(start, end, column=entry.value.start_mark.column, indent=_INDENT, lines=text)

    def _indent_lines(
        self, start: int, end: int, *, column: int, indent: str, lines: list[str] | None = None
    ) -> Iterator[str]:
        for line in (lines or self._lines)[start:end]:
            is_inside = line[:column].isspace() or not column
            yield indent + line[column:] if line.strip() and is_inside else line

    def _replace_lines(self, entry: _Entry, text: str) -> _Edit:
        """Replace the lines of a section."""
        start, end = entry.key.start_mark.line, _end(entry.value).line + 1
        return _Edit(self._starts[start], self._starts[end], text)

    def _comment(self, entry: _Entry) -> str:
        """Return what follows a key in its line, unless that is the value."""
        is_below = entry.value.start_mark.line > entry.key.start_mark.line
        return self._rest_of_line(entry.key.end_mark.index + 1) if is_below else ""

    def _rest_of_line(self, index: int) -> str:
        return self._text[index:].partition("\n")[0].rstrip()

    def _source(self, node: yaml.Node) -> str:
        return self._text[node.start_mark.index : _end(node).index]

    def _dedent(self, node: yaml.Node) -> str:
        return " " * node.start_mark.column + self._source(node)


def _entries(node: yaml.Node | None) -> dict[str, _Entry]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: _Entry(key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def _rename(key: yaml.ScalarNode, new: str) -> _Edit:
    return _Edit(key.start_mark.index, key.end_mark.index, new)


def _end(node: yaml.Node) -> yaml.Mark:
    """Return the end of a value; that of a block is where the next token starts, behind comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark


def _parse(text: str) -> Any:
    value, _ = lines.parse(text, place=str)
    return value


def _is(tree: object, text: str) -> bool:
    try:
        return bool(_parse(text) == tree)
    except ExperimentError:  # e.g. an anchor was moved below its alias
        return False


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
