"""Links of a run's summary to pages of the tracking store, whose addresses are known only where it is written to."""

import re
from collections.abc import Callable
from typing import Literal

Page = Literal["run", "trials", "charts"]
"""The page of a run, or the table or the charts of a sweep's trials."""
_LINK = re.compile(r"\[([^\]]*)\]\((run|trials|charts):([^)\s]+)\)")


def link(text: str, page: Page, *, run: str) -> str:
    """Return a Markdown link to a page of a run, named by its id."""
    return f"[{text}]({page}:{run})"


def completed(markdown: str, address: Callable[[Page, str], str | None]) -> str:
    """Return a summary whose links have addresses; those without one become plain text.

    Args:
        markdown: the summary.
        address: returns the address of a page by its kind and the run's id, or None.
    """

    def complete(found: re.Match[str]) -> str:
        text, page, run = found.groups()
        target = address(page, run)  # type: ignore[arg-type]  # the pattern has the pages
        return f"[{text}]({target})" if target else text

    return _LINK.sub(complete, markdown)
