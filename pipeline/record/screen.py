"""Output of a command on the terminal: its streams, chosen by ``--json`` and ``--quiet``, and the lines of screens."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typing_extensions import override

from pipeline.system import redirect_to_null

_ADDRESS = r"https?://\S+"
_LABEL = re.compile(r"[A-Z]{3,}(?=  )")  # Label at the beginning of a screen's line, e.g. RESULT.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but tabs and ends of lines: in a foreign text, such as an exception's, they steer the terminal."""


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

    progress: Console  # Progress; silent with ``--quiet``
    result: Console  # Results for people; not on standard output with ``--json``
    warnings: Console  # Warnings; never silent

    @classmethod
    def of(cls, *, as_json: bool = False, quiet: bool = False) -> "Terminal":
        """Return the consoles: the result goes to standard output, everything else to standard error."""
        stderr = OptionalConsole(
            highlight=False, file=sys.stderr, stderr=True
        )  # a later one may be an export's, unseen
        silent = Console(quiet=True)
        result = stderr if as_json else OptionalConsole(highlight=False)
        return cls(
            progress=silent if quiet else stderr, result=silent if quiet and as_json else result, warnings=stderr
        )

    @classmethod
    def on(cls, console: Console) -> "Terminal":
        """Return one console for all output, e.g. a log's."""
        return cls(progress=console, result=console, warnings=console)


def write(stdout: Console, text: str, *, style: str = "") -> None:
    """Print a line; a terminal wraps it between words, but a command to copy stays whole, as in a file or a pipe."""
    stdout.print(Text(text, style=style), soft_wrap=not stdout.is_interactive or ": pipeline " in text)


def without_controls(text: str) -> str:
    """Remove control characters from a text, but tabs and ends of lines."""
    return _CONTROL.sub("", text)


def linked(text: str) -> Text:
    """Make the addresses in a text links, for terminals that have them; to be printed with ``soft_wrap``."""
    shown = Text(without_controls(text))
    shown.highlight_regex(_ADDRESS, lambda address: f"link {address}")
    return shown


def print_screen(lines: Sequence[str], *, stdout: Console) -> None:
    """Print the lines of a screen, which are as long as they may be; the title and labels are bold."""
    title = next((line for line in lines if line), "")
    for line in lines:
        text = Text(line, style="bold" if line == title else "")
        if label := _LABEL.match(line):
            text.stylize("bold yellow" if label[0] == "WARNING" else "bold", *label.span())
        stdout.print(text, soft_wrap=True)
