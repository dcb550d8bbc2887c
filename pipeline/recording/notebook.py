"""Display of a running trial in a notebook: plain HTML replaced in place, which needs no widget extension."""

import time
from html import escape
from typing import TYPE_CHECKING

from pipeline.protocol.events import Advanced
from pipeline.recording.display import Outlook, Shown, below
from pipeline.recording.progress_bars import amounts
from pipeline.recording.trial_progress import TrialProgress, left

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_EVERY_S = 0.25  # between two updates


class NotebookDisplay:
    """Display with a progress bar and lines of figures; all disappear when the trial ends.

    An evaluation or an upload has a second bar meanwhile.

    Args:
        label: text before the bar.
        waiting: what the trial waits for at first.
        progress: state of the trial, updated before each event is shown.
        outlook: see `pipeline.recording.display`.
    """

    def __init__(self, label: str, *, waiting: str, progress: TrialProgress, outlook: Outlook = lambda _: []) -> None:
        self._label, self._waiting, self._progress, self._outlook = label, waiting, progress, outlook
        self._activities: dict[str, Advanced] = {}
        self._now = 0.0  # of the workers
        self._shown_at = time.monotonic()
        self._handle = _displayed(self._html())

    def show(self, event: Shown) -> None:
        """Update the progress."""
        self._now = event.time
        if isinstance(event, Advanced):
            self._activities.pop(event.what, None)
            if event.done != event.total:
                self._activities[event.what] = event
        if (now := time.monotonic()) - self._shown_at >= _EVERY_S:
            self._shown_at = now
            _replace_html(self._handle, self._html())

    def close(self) -> None:
        """Remove the display: the trial has ended."""
        _replace_html(self._handle, "")

    def _html(self) -> str:
        state = self._progress
        if state.started is None:
            bars = [_bar(f"{self._label}: {f'{state.stage} ...' if state.stage else self._waiting}", 0, None)]
        elif state.is_over:
            bars = [_bar(f"{self._label}: {state.step} steps done, {state.stage} ...", 0, None)]
        else:
            where = ", ".join([self._label, state.position()[0], *left(state.left_s(self._now))])
            bars = [_bar(where, state.step, state.started.total_steps)]
        bars += [_bar(f"{what}, {amounts(event)}", event.done, event.total) for what, event in self._activities.items()]
        figures = map(", ".join, below(state, now=self._now, outlook=self._outlook))
        lines = (f'<div style="opacity: 0.7; margin-left: 1em">{escape(line)}</div>' for line in figures if line)
        return "".join([*bars, *lines])


def _bar(label: str, done: int, total: int | None) -> str:
    attributes = "" if total is None else f' value="{done}" max="{total}"'  # without a value: an animated bar
    return f'<div>{escape(label)} <progress{attributes} style="width: 20em"></progress></div>'


def _displayed(html: str) -> "DisplayHandle | None":
    from IPython.display import display

    handle: DisplayHandle | None = display(_mime(html), raw=True, display_id=True)
    return handle


def _replace_html(handle: "DisplayHandle | None", html: str) -> None:
    if handle is not None:
        handle.update(_mime(html), raw=True)


def _mime(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": ""}
