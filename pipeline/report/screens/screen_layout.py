"""Layout of a screen: blocks of at most 80 columns, of which the least important are left out above 24 lines."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 80, 24
LABEL = 9
"""Width of the labels at the left, e.g. "RESULT"."""
_GAP = "  "
_NARROWEST = 12
"""Width of the first column of a table below which it is not wrapped further."""


class Block(NamedTuple):
    """Lines of a screen that belong together; a blank line separates blocks."""

    lines: tuple[str, ...]
    rank: int = 0
    """0 for what every screen shows; of the others, the highest rank is left out first."""


class Column(NamedTuple):
    """A column of a table."""

    head: str
    """Title, of one line or of several."""
    cells: tuple[str, ...]
    rank: int = 0
    """0 for a column that every table shows; of the others, the highest rank is left out first."""
    is_text: bool = False
    """True to align it to the left."""


class Places(NamedTuple):
    """Where a run's results are, and the commands to go on with."""

    folder: str
    """Path of the run's folder, as the user would write it."""
    run: str
    """Name of the run for other commands, e.g. "latest"."""
    page: str = ""
    """Path of the report's page; empty without one."""
    mlflow: str = ""
    """How to open MLflow, e.g. "pipeline ui"; empty if the run is not tracked."""
    command: str = ""
    """Command that made the run; empty if it was made from Python."""
    others: tuple[str, ...] = ()
    """Lines on other trackers, e.g. the command that opens TensorBoard."""


def assemble(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Return the lines of a screen; blocks without lines are skipped, and so are the last blank lines if need be."""
    kept = [block for block in blocks if block.lines]
    while sum(len(block.lines) + 1 for block in kept) - 1 > HEIGHT and any(block.rank for block in kept):
        kept.remove(max(kept, key=lambda block: block.rank))
    blank = HEIGHT - sum(len(block.lines) for block in kept)
    lines: list[str] = []
    for number, block in enumerate(kept):
        lines += [*([""] if 0 < number <= blank else []), *block.lines]
    return tuple(lines)


def assemble_first_fit(screens: Iterable[Sequence[Block]]) -> tuple[str, ...]:
    """Return the lines of the first of several screens that fits, else of the last one."""
    lines: tuple[str, ...] = ()
    for blocks in screens:
        lines = assemble(blocks)
        if len(lines) <= HEIGHT:
            break
    return lines


def wrap(text: str, *, first: str = "", rest: str = "") -> tuple[str, ...]:
    """Wrap a text between words; ``first`` and ``rest`` are the beginnings of its lines."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return tuple(lines)


def label(name: str, *texts: str) -> tuple[str, ...]:
    """Return texts with a label at the left, e.g. "RESULT", each text from a new line on."""
    lines: list[str] = []
    for text in texts:
        first = name if not lines else ""
        lines += wrap(text, first=f"{first:<{LABEL}}", rest=" " * LABEL)
    return tuple(lines)


def label_command(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return a shell command with a label at the left; a command of several lines can be pasted."""
    first, *others = wrap_command(words, width=WIDTH - LABEL)
    return (f"{name:<{LABEL}}{first}", *(f"{'':<{LABEL}}{line}" for line in others))


def wrap_command(words: Sequence[str], *, width: int) -> tuple[str, ...]:
    """Return a shell command, in words as a shell needs them, in lines that can be pasted."""
    lines, line = [], ""
    for word in words:
        longer = f"{line} {word}" if line.strip() else f"{line}{word}"
        if line.strip() and len(longer) > width - 2:
            lines.append(f"{line} \\")
            longer = f"  {word}"
        line = longer
    return (*lines, line)


def lay_out(columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the lines of a table; columns with a rank that don't fit are left out, and the first column is wrapped."""
    kept = list(columns)
    while _width(kept) > WIDTH and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    room = max(_NARROWEST, WIDTH - _width(kept[1:]) - len(_GAP))
    depth = max(column.head.count("\n") for column in kept) + 1
    heads = [[""] * (depth - 1 - column.head.count("\n")) + column.head.split("\n") for column in kept]
    rows: list[Sequence[str]] = [*zip(*heads, strict=True)]
    for first, *cells in zip(*(column.cells for column in kept), strict=True):
        *above, last = textwrap.wrap(first, room, subsequent_indent="  ", break_long_words=False) or [""]
        rows += [*((line, *[""] * len(cells)) for line in above), (last, *cells)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return tuple(_join(row, widths, is_text=[column.is_text for column in kept]) for row in rows)


def _join(cells: Sequence[str], widths: Sequence[int], *, is_text: Sequence[bool]) -> str:
    padded = [
        f"{cell:<{width}}" if left else f"{cell:>{width}}"
        for cell, width, left in zip(cells, widths, is_text, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _width(columns: Sequence[Column]) -> int:
    return sum(map(_widest, columns)) + len(_GAP) * (len(columns) - 1)


def _widest(column: Column) -> int:
    return max(map(len, (*column.head.split("\n"), *column.cells)))
