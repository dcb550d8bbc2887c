"""Words that many messages have."""

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Such as "1 worker", "2 workers"."""
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def nearest(word: str, among: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name most like ``word``, or None; case and dashes for underscores don't count as differences."""
    names = {_plain(name): name for name in among}
    found = difflib.get_close_matches(_plain(word), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def did_you_mean(word: str, among: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a sentence, such as "; did you mean epochs?", or nothing."""
    name = nearest(word, among, cutoff=cutoff)
    return f"; did you mean {name}?" if name else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
