"""One line with what a command waits for before its first trial: `pipeline.system.stages`, shown on a console."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pipeline.system import stages

_LONG_S = 5.0
"""Seconds after which a stage gets a plain line in a pipe or a log."""
_TOLD_FROM_S = 2  # seconds of a stage from which a terminal shows them


@contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Show the stages that begin inside the block: a terminal replaces the line, a pipe gets one for each long stage.

    Nothing is shown on a quiet console, and in a notebook.
    """
    if console.quiet or console.is_jupyter:
        yield
        return
    show = _Replaced(console).show if console.is_interactive else _Plain(console).show
    with stages.show_stages_on(show):
        yield


class _Replaced:
    """A line on a terminal with a spinner and, after a while, the seconds that the stage has taken."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage, self._since = "", 0.0
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def show(self, stage: str) -> None:
        """Replace the line; an empty text removes it."""
        if not stage:
            if self._live:
                self._live.stop()
            self._live = None
            return
        self._stage, self._since = stage, time.monotonic()
        if self._live is None:
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                transient=True,
                refresh_per_second=8,
                redirect_stdout=False,  # a library that is imported now may keep the streams that it finds
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def _line(self) -> Spinner:
        seconds = int(time.monotonic() - self._since)
        text = f"{self._stage} ...{f' {seconds} s' if seconds >= _TOLD_FROM_S else ''}"
        self._spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return self._spinner


class _Plain:
    """A line in a pipe or a log for each stage that takes more than a few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._timer: threading.Timer | None = None

    def show(self, stage: str) -> None:
        """Print the stage if it lasts; an empty text ends it."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        if stage:
            self._timer = threading.Timer(_LONG_S, self._console.print, [f"{stage} ..."], {"markup": False})
            self._timer.daemon = True
            self._timer.start()
