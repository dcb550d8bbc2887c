"""Display of a running trial in a notebook: a terminal's, as HTML replaced in place without a widget extension."""

import io
import time
from typing import TYPE_CHECKING

import rich.console
from typing_extensions import override

from pipeline.record.terminal.bars import LiveDisplay
from pipeline.record.terminal.plain_lines import Shown

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_EVERY_S = 0.25  # between two updates
_FORMAT = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


class NotebookDisplay(LiveDisplay):
    """Display with the same bars and figures as a terminal's."""

    _shown_at: float
    _handle: "DisplayHandle | None"

    @override
    def show(self, event: Shown) -> None:
        super().show(event)
        if (now := time.monotonic()) - self._shown_at >= _EVERY_S:
            self._shown_at = now
            _replace_html(self._handle, self._html())

    @override
    def close(self) -> None:
        _replace_html(self._handle, "")

    @override
    def _start(self) -> None:
        self._shown_at = time.monotonic()
        self._handle = _displayed(self._html())

    def _html(self) -> str:
        page = rich.console.Console(
            file=io.StringIO(), record=True, width=self._stdout.width, force_jupyter=False, force_terminal=True
        )
        page.print(self._render())
        return page.export_html(inline_styles=True, code_format=_FORMAT)


def _displayed(html: str) -> "DisplayHandle | None":
    from IPython.display import display

    handle: DisplayHandle | None = display(_mime(html), raw=True, display_id=True)
    return handle


def _replace_html(handle: "DisplayHandle | None", html: str) -> None:
    if handle is not None:
        handle.update(_mime(html), raw=True)


def _mime(html: str) -> dict[str, str]:
    return {"text/html": html, "text/plain": ""}
