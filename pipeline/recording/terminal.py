"""Output streams of a command, chosen by ``--json`` and ``--quiet``."""

from typing import NamedTuple

import rich.console
from rich.text import Text


class Terminal(NamedTuple):
    """Consoles of a command by kind of output."""

    progress: rich.console.Console
    """Progress; silent with ``--quiet``."""
    result: rich.console.Console
    """Results for people; not on standard output with ``--json``."""
    warnings: rich.console.Console
    """Warnings; never silent."""

    @classmethod
    def of(cls, *, as_json: bool = False, quiet: bool = False) -> "Terminal":
        """Return the consoles of a command.

        Args:
            as_json: standard output is one JSON document; all else goes to standard error.
            quiet: no progress; warnings go to standard error.
        """
        stderr = rich.console.Console(highlight=False, stderr=True)
        stdout = stderr if as_json else rich.console.Console(highlight=False)
        silent = rich.console.Console(quiet=True)
        if not quiet:
            return cls(progress=stdout, result=stdout, warnings=stdout)
        return cls(progress=silent, result=silent if as_json else stdout, warnings=stderr)

    @classmethod
    def on(cls, console: rich.console.Console) -> "Terminal":
        """Return one console for all output, e.g. a log's."""
        return cls(progress=console, result=console, warnings=console)


def write(stdout: rich.console.Console, text: str, *, style: str = "") -> None:
    """Print a line; a terminal wraps it between words, a log file gets it unbroken for grep."""
    stdout.print(Text(text, style=style), soft_wrap=not stdout.is_interactive)
