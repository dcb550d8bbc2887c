"""Fixed results in, the text of ``tests/unit/screens/NAME.txt`` out; UPDATE_SCREENS=1 writes these files."""

import os
from pathlib import Path

from pipeline.results.record import Result
from pipeline.results.terminal import format_screen

SCREENS = Path(__file__).parents[1] / "unit" / "screens"


def check(name: str, text: str) -> None:
    """Compare a text with its file."""
    path = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text()


def shown(made: Result) -> str:
    """Return the screen of a result, which fits a terminal."""
    lines = format_screen(made)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return "\n".join([*lines, ""])
