"""Output of a command on the terminal: its streams, chosen by ``--json`` and ``--quiet``, reports, and tables by rich.

No cell of a table is ever cut, in a narrow terminal or in a pipe. What rich doesn't do is done here: heads in several
lines that leave numbers unbroken, and hanging indents.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from pipeline.system import redirect_to_null

if TYPE_CHECKING:
    from pipeline.report.text.tables import ReportTable

_ADDRESS = r"https?://\S+"
_LABEL = re.compile(r"[A-Z]{3,}(?=  )")
"""Label at the beginning of a screen's line, e.g. RESULT."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but tabs and ends of lines: in a foreign text, such as an exception's, they steer the terminal."""
_ANY_WIDTH = 10_000
_NAME_WIDTH = 21  # of the first column; longer titles wrap between words, so that figures need not


class OptionalConsole(Console):
    """Console of all commands, which prints no control characters but rich's own.

    It is silent once no one reads it, e.g. after ``pipeline run FILE | head``: training continues.
    """

    @override
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True
        redirect_to_null(self.file.fileno())  # Python flushes the stream when it exits


class Terminal(NamedTuple):
    """Consoles of a command by kind of output."""

    progress: Console
    """Progress; silent with ``--quiet``."""
    result: Console
    """Results for people; not on standard output with ``--json``."""
    warnings: Console
    """Warnings; never silent."""

    @classmethod
    def of(cls, *, as_json: bool = False, quiet: bool = False) -> "Terminal":
        """Return the consoles: the result goes to standard output, everything else to standard error.

        Args:
            as_json: standard output is one JSON document, so the result for people goes to standard error, too.
            quiet: no progress.
        """
        stderr, silent = OptionalConsole(highlight=False, stderr=True), Console(quiet=True)
        result = stderr if as_json else OptionalConsole(highlight=False)
        return cls(
            progress=silent if quiet else stderr, result=silent if quiet and as_json else result, warnings=stderr
        )

    @classmethod
    def on(cls, console: Console) -> "Terminal":
        """Return one console for all output, e.g. a log's."""
        return cls(progress=console, result=console, warnings=console)


def write(stdout: Console, text: str, *, style: str = "") -> None:
    """Print a line; a terminal wraps it between words, a file or a pipe gets it unbroken for grep."""
    stdout.print(Text(text, style=style), soft_wrap=not stdout.is_interactive)


def without_controls(text: str) -> str:
    """Remove control characters from a text, but tabs and ends of lines."""
    return _CONTROL.sub("", text)


def linked(text: str) -> Text:
    """Make the addresses in a text links, for terminals that have them; to be printed with ``soft_wrap``."""
    shown = Text(without_controls(text))
    shown.highlight_regex(_ADDRESS, lambda address: f"link {address}")
    return shown


def print_report_table(report_table: "ReportTable", *, console: Console) -> None:
    """Print a table of numbers, the title above and the notes below."""
    if report_table.title:
        console.print(Text(report_table.title, style="bold"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, name in enumerate(report_table.header):  # in at most three lines, as narrow as possible
        widths = range(max(map(len, name.split())), len(name) + 1)
        title = next(lines for width in widths if (lines := textwrap.fill(name, width)).count("\n") < 3)
        table.add_column(title, justify="right" if index else "left", vertical="bottom", overflow="fold")
    for index, (name, *cells) in enumerate(report_table.rows):
        lines = textwrap.fill(name, _NAME_WIDTH, subsequent_indent="  ", break_long_words=False)
        table.add_row(*map(Text, (lines, *cells)), style="bold" if index == report_table.emphasis else "")
    print_table(table, console=console)
    if report_table.notes:
        console.print(headed(["", *report_table.notes], width=console.width))


def print_table(table: Table, *, console: Console) -> None:
    """Print a table without cutting a cell; a terminal folds wide ones, but not those of ``no_wrap`` columns."""
    if not console.is_terminal or all(column.no_wrap for column in table.columns):
        table.width = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    console.print(table, crop=False)


def headed(lines: Sequence[str], *, width: int) -> Text:
    """Wrap lines between words; the first is bold."""
    wrapped = [textwrap.fill(line, width, subsequent_indent="  ") for line in lines]
    return Text("\n").join(Text(line, style="" if index else "bold") for index, line in enumerate(wrapped))


class Printable(Protocol):
    """Parts of a `pipeline.report.report.Report` to print."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables, the title first."""

    @property
    def tables(self) -> "Sequence[ReportTable]":
        """Tables of measurements, the result first."""

    @property
    def blocks(self) -> Sequence[Sequence[str]]:
        """Lines below the tables in blocks, the title of each block first."""

    @property
    def verdict(self) -> str:
        """Result in one line."""


def print_screen(lines: Sequence[str], *, stdout: Console) -> None:
    """Print the lines of a screen, which are as long as they may be; the title and labels are bold."""
    title = next((line for line in lines if line), "")
    for line in lines:
        text = Text(line, style="bold" if line == title else "")
        if label := _LABEL.match(line):
            text.stylize("bold yellow" if label[0] == "WARNING" else "bold", *label.span())
        stdout.print(text, soft_wrap=True)


def print_report(report: Printable, *, stdout: Console) -> None:
    """Print a whole report: title, tables and notes."""
    stdout.print(headed(report.opening, width=stdout.width))
    for table in report.tables:
        stdout.print()
        print_report_table(table, console=stdout)
    for block in report.blocks:
        stdout.print("", headed(block, width=stdout.width), sep="\n")


def print_verdict(report: Printable, *, stdout: Console) -> None:
    """Print the result in one line."""
    write(stdout, report.verdict, style="bold")
