"""Where a command shows what, ``--json`` and ``--quiet`` choose, and a line there."""

from typing import NamedTuple

import rich.console
from rich.text import Text


class Terminal(NamedTuple):
    """The places for what a command has to say."""

    progress: rich.console.Console
    """How far it is; silent with ``--quiet``."""
    result: rich.console.Console
    """What came out, for people."""
    warnings: rich.console.Console
    """What a user should know; never silent."""

    @classmethod
    def of(cls, *, as_json: bool = False, quiet: bool = False) -> "Terminal":
        """The places of a command.

        Args:
            as_json: standard output belongs to one JSON document, and all else goes to standard error.
            quiet: no progress, and warnings don't mix with the result.
        """
        stderr = rich.console.Console(highlight=False, stderr=True)
        stdout = stderr if as_json else rich.console.Console(highlight=False)
        silent = rich.console.Console(quiet=True)
        if not quiet:
            return cls(progress=stdout, result=stdout, warnings=stdout)
        return cls(progress=silent, result=silent if as_json else stdout, warnings=stderr)

    @classmethod
    def on(cls, console: rich.console.Console) -> "Terminal":
        """All in one place, such as a log."""
        return cls(progress=console, result=console, warnings=console)


def write(stdout: rich.console.Console, text: str, *, style: str = "") -> None:
    """Print a line: whole into a log file, so that it can be searched; a terminal wraps between words."""
    stdout.print(Text(text, style=style), soft_wrap=not stdout.is_interactive)
