"""Wording shared by messages: figures, counted nouns, durations, the name that was meant, lines of errors."""

import difflib
from collections.abc import Iterable, Sequence
from functools import partial


def figure(value: float, *, digits: int = 4) -> str:
    """Return a measured number with its significant digits and without an exponent, e.g. "0.0335", "690", "18,470"."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e15 else f"{value:.{digits}g}"


def counted(number: int, noun: str, *, spec: str = "") -> str:
    """Return a number with its noun, e.g. "1 worker", "2 workers"; ``spec`` formats it, e.g. "," for thousands."""
    return f"1 {noun}" if number == 1 else f"{number:{spec}} {noun}s"


def format_parallel(strategy: str, workers: int, *, devices: int = 1) -> str:
    """Name a parallel configuration, e.g. "ddp, 2 workers", "dp, 2 GPUs" or "1 worker"; ``devices`` of each worker."""
    size = counted(devices, "GPU") if workers == 1 and devices > 1 else counted(workers, "worker")
    return size if strategy == "single" else f"{strategy}, {size}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, e.g. "4.2 s", "1 min 40 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {seconds % 60:.0f} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """Format a duration as a clock does, e.g. "0:35", "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def approximate(seconds: float) -> str:
    """Return a rough duration, e.g. "7 s", "40 s", "90 s", "3 min"."""
    if seconds >= 120:
        return f"{round(seconds / 60)} min"
    unit = 1 if seconds < 10 else 5
    return f"{max(1, round(seconds / unit) * unit)} s"


def join_names(names: Sequence[str]) -> str:
    """Return names as a sentence has them, e.g. "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Return names with commas, the first ones of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(word: str, among: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar name, or None; ignores case, and dashes in place of underscores."""
    names, word = {_plain(name): name for name in among}, _plain(word)

    def differs(name: str) -> tuple[int, int, int]:
        """Count letters, kinds of letters, and length: difflib prefers dp to ddp for dpp, as it lacks a letter only."""
        equal = sum(block.size for block in difflib.SequenceMatcher(None, name, word).get_matching_blocks())
        longer, shorter = sorted((len(word), len(name)), reverse=True)
        return longer - equal, len({*word} - {*name}), longer - shorter

    found = partial(difflib.get_close_matches, word, names)
    return names[min(found(cutoff=min(cutoff, 0.6)), key=differs)] if found(cutoff=cutoff) else None


def did_you_mean(word: str, among: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the end of a message, such as "; did you mean epochs?"; empty if no name is similar."""
    name = nearest(word, among, cutoff=cutoff)
    return f"; did you mean {name}?" if name else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or its type; Ray's messages end with what matters."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
