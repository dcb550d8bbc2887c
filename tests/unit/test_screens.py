"""Fixed results in, the text of ``screens/NAME.txt`` out; UPDATE_SCREENS=1 writes these files."""

import os
from pathlib import Path


def check(name: str, text: str) -> None:
    """Compare a text with its file."""
    path = Path(__file__).parent / "screens" / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text()
