"""Tables in the terminal: they fit 80 columns and need no colour; in a narrower terminal, nothing is cut off."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000
_NAME_WIDTH = 16  # of the first column; longer titles wrap between words, so that figures need not


class PrintableTable(Protocol):
    """What is shown of a `pipeline.report.tables.Table`: this package doesn't import that one."""

    @property
    def title(self) -> str:
        """Stands above; may be empty."""

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """What stands in them."""

    @property
    def emphasis(self) -> int | None:
        """Index of the row to stress."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines below."""


def laid_out(printable: PrintableTable, *, width: int) -> Iterator[RenderableType]:
    """The table with its title above and its notes below."""
    if printable.title:
        yield Text(printable.title, style="bold")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(printable.header):
        table.add_column(_in_two_lines(name), justify="right" if index else "left", vertical="bottom", overflow="fold")
    for index, (name, *cells) in enumerate(printable.rows):
        lines = textwrap.fill(name, _NAME_WIDTH, subsequent_indent="  ", break_long_words=False)
        table.add_row(*map(Text, (lines, *cells)), style="bold" if index == printable.emphasis else "")
    yield table
    if printable.notes:
        yield headed(["", *printable.notes], width=width)


def width_of(table: Table, console: Console) -> int:
    """Columns that a table needs so that nothing is cut, however narrow the terminal is."""
    return console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum


def headed(lines: Sequence[str], *, width: int) -> Text:
    """Lines that wrap between words, the first one bold."""
    wrapped = [textwrap.fill(line, width, subsequent_indent="  ") for line in lines]
    return Text("\n").join(Text(line, style="" if index else "bold") for index, line in enumerate(wrapped))


def _in_two_lines(name: str) -> str:
    """A column's name, as narrow as two lines allow."""
    longest = max(map(len, name.split()))
    return next(
        lines for width in range(longest, len(name) + 1) if (lines := textwrap.fill(name, width)).count("\n") < 2
    )
