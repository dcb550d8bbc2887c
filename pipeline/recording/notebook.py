"""Display of a running trial in a notebook: plain HTML replaced in place, which needs no widget extension."""

import time
from html import escape
from typing import TYPE_CHECKING

from pipeline.protocol.events import Advanced, FirstStep, Metrics, Started
from pipeline.recording.display import Shown, amounts, facts, figures, position

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_EVERY_S = 0.25  # between two updates


class NotebookDisplay:
    """Display with a progress bar and a line of figures; both disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile.
    """

    def __init__(self, label: str, *, waiting: str) -> None:
        self._label, self._below = label, waiting
        self._done: tuple[int, int | None] = 0, None
        self._started: Started | None = None
        self._values: dict[str, float] = {}
        self._activities: dict[str, Advanced] = {}
        self._shown_at = time.monotonic()
        self._handle = _displayed(self._html())

    def show(self, event: Shown) -> None:
        """See `Display`."""
        match event:
            case Started():
                self._started, self._done = event, (0, event.total_steps)
                self._below = f"{facts(event)}; first step ..."
            case FirstStep():
                self._below = "training ..."
            case Metrics() if self._started:
                self._values |= {point.name: point.value for point in event.points}
                self._done = event.step, self._started.total_steps
                self._below = ", ".join([*position(event, self._started), *figures(self._values)])
            case Advanced() if event.done == event.total:
                self._activities.pop(event.what, None)
            case Advanced():
                self._activities[event.what] = event
        if (now := time.monotonic()) - self._shown_at >= _EVERY_S:
            self._shown_at = now
            _replace(self._handle, self._html())

    def close(self) -> None:
        """See `Display`."""
        _replace(self._handle, "")

    def _html(self) -> str:
        bars = [_bar(self._label, *self._done)]
        bars += [_bar(f"{what}, {amounts(event)}", event.done, event.total) for what, event in self._activities.items()]
        below = f'<div style="opacity: 0.7; margin-left: 1em">{escape(self._below)}</div>'
        return "".join([*bars, below])


def _bar(label: str, done: int, total: int | None) -> str:
    attributes = "" if total is None else f' value="{done}" max="{total}"'  # without a value: an animated bar
    return f'<div>{escape(label)} <progress{attributes} style="width: 20em"></progress></div>'


def _displayed(html: str) -> "DisplayHandle | None":
    from IPython.display import display

    handle: DisplayHandle | None = display(_mime(html), raw=True, display_id=True)
    return handle


def _replace(handle: "DisplayHandle | None", html: str) -> None:
    if handle is not None:
        handle.update(_mime(html), raw=True)


def _mime(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": ""}
