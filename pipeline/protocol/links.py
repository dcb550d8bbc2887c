"""Links of a run's summary to runs in the tracking store, whose addresses are known only where it is written to."""

import re
from collections.abc import Callable

_LINK = re.compile(r"\[([^\]]*)\]\(run:([^)\s]+)\)")


def link(text: str, *, run: str) -> str:
    """Return a Markdown link to the page of a run, named by its id."""
    return f"[{text}](run:{run})"


def completed(markdown: str, address: Callable[[str], str | None]) -> str:
    """Return a summary with the ``address`` of each run that is linked by its id; without one, a link becomes text."""

    def complete(found: re.Match[str]) -> str:
        text, run = found.groups()
        target = address(run)
        return f"[{text}]({target})" if target else text

    return _LINK.sub(complete, markdown)
