"""A result on the terminal: a screen of at most 24 lines of 80 columns, or with ``--full`` all of it."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from pipeline.record.screen import Terminal, print_screen, write
from pipeline.results.record import Advice, Fact, Result, Table, format_fact

WIDTH, HEIGHT = 80, 24
LABEL = 9  # Width of the labels at the left, e.g. "RESULT".
_GAP = "  "
_NARROWEST = 12  # Width of the first column of a table below which it is not wrapped further
_FEWEST_ROWS = 3  # Rows of a table that a screen shows in any case
_MOST_NOTES = 4


def print_result(result: Result, *, terminal: Terminal, is_verbose: bool = False) -> None:
    """Print what a command ends with; with ``--quiet`` the answer alone, with ``--verbose`` all of it first."""
    if terminal.progress.quiet:
        write(terminal.result, result.verdict, style="bold")
        return
    full = (*format_full(result), "") if is_verbose else ()
    print_screen([*full, *format_screen(result)], stdout=terminal.result)


def format_screen(result: Result) -> tuple[str, ...]:
    """Return the lines of the screen that ends a command: the answer first, what doesn't fit is left out.

    Left out are, in this order: the second and further notes, the notes below the table, rows of the table, the first
    note.
    """
    head = [wrap(result.title, rest="  "), label(result.label, *result.headline)]
    actions = tuple(line for advice in result.advice[:1] for line in _format_advice(advice))
    actions += tuple(line for name, text in result.next for line in _format_next(name, text))
    table = result.tables[0] if result.tables and not result.tables[0].is_folded else None
    places = _format_places(result)
    rows = len(table.rows) if table else 0
    choices = [(rows, True, notes) for notes in range(min(len(result.notes), _MOST_NOTES), 0, -1)]
    choices += [(fewer, False, min(1, len(result.notes))) for fewer in range(rows, _FEWEST_ROWS - 1, -1)]
    choices += [(min(rows, _FEWEST_ROWS), False, 0)]
    for most_rows, has_table_notes, most_notes in choices:
        notes = tuple(line for note in result.notes[:most_notes] for line in wrap(note, rest="  "))
        shown = format_table(table, most_rows=most_rows) if table else ()
        below = tuple(line for note in table.notes for line in wrap(note, rest="    ")) if table else ()
        blocks = [*head, actions, shown, below if has_table_notes else (), notes, places]
        lines = _join(blocks)
        if len(lines) <= HEIGHT:
            break
    return lines


def format_full(result: Result, *, width: int = WIDTH) -> tuple[str, ...]:
    """Return all of a result: its answer, advice, tables, numbers and notes, for a terminal of this width."""
    blocks = [wrap(result.title, rest="  "), wrap(result.hardware), label(result.label, *result.headline)]
    blocks += [tuple(line for advice in result.advice for line in _format_advice(advice))]
    blocks += [tuple(line for name, text in result.next for line in _format_next(name, text))]
    for table in result.tables:
        notes = (line for note in table.notes for line in wrap(note, rest="    "))
        blocks.append((*((table.title,) if table.title else ()), *format_table(table, width=width), *notes))
    own = [fact for fact in result.facts if fact.trial == result.facts[0].trial and fact.value is not None]
    named = [(fact.label or fact.key, format_fact(fact)) for fact in own]
    widest = max((len(name) for name, _ in named), default=0)
    blocks.append(tuple(f"{name:<{widest}}  {text}" for name, text in named))
    numbered = enumerate(result.notes, start=1)
    blocks.append(tuple(line for number, note in numbered for line in wrap(f"{number}. {note}", rest="   ")))
    blocks.append(_format_places(result))
    return tuple(line for block in blocks if block for line in (*block, ""))[:-1]


def format_table(table: Table, *, most_rows: int | None = None, width: int = WIDTH) -> tuple[str, ...]:
    """Return the lines of a table, with the row that the result is about among the rows that are shown.

    Where ``width`` has no room for all columns, the last ones are left out: the page has them.
    """
    rows, more = list(table.rows), list[str]()
    if most_rows is not None and len(rows) > most_rows:
        hidden = len(rows) - most_rows
        main = [rows[table.emphasis]] if table.emphasis is not None and table.emphasis >= most_rows else []
        rows = [*rows[: most_rows - len(main)], *main]
        more.append(f"{hidden} more rows with --full or --verbose")
    cells = [table.header, *([format_cell(cell) for cell in row] for row in rows)]
    names, *columns = (list(column) for column in zip(*cells, strict=True))
    longest_word = max(len(word) for name in names for word in name.split())
    narrowest = min(max(_NARROWEST, longest_word), max(map(len, names)))
    while len(columns) > 1 and _width(columns) + narrowest > width:
        columns.pop()
    room = max(narrowest, width - _width(columns))
    lines: list[list[str]] = []
    for name, *others in zip(names, *columns, strict=True):
        *above, last = textwrap.wrap(
            name, room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines += [[line, *[""] * len(others)] for line in above] + [[last, *others]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [not any(isinstance(row[index], Fact) for row in rows) for index in range(len(table.header))]
    return (*(_join_cells(line, widths, texts) for line in lines), *more)


def format_cell(cell: Fact | str) -> str:
    """Return a cell as text."""
    return cell if isinstance(cell, str) else format_fact(cell)


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + len(_GAP) for column in columns)


def _join_cells(cells: Sequence[str], widths: Sequence[int], texts: Sequence[bool]) -> str:
    padded = [
        f"{cell:<{width}}" if is_text and not number else f"{cell:>{width}}"
        for number, (cell, width, is_text) in enumerate(zip(cells, widths, texts, strict=False))
    ]
    return _GAP.join(padded).rstrip()


def _join(blocks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the lines of blocks with a blank line between two, as far as there is room for blank lines."""
    kept = [block for block in blocks if block]
    blank = HEIGHT - sum(map(len, kept))
    lines: list[str] = []
    for number, block in enumerate(kept):
        lines += [*([""] if 0 < number <= blank else []), *block]
    return tuple(lines)


def _format_advice(advice: Advice) -> Iterator[str]:
    """Yield what to use, or to try, and why."""
    name = "USE" if advice.use else "TRY"
    use = f"{advice.use}:" if advice.use else ""
    if advice.overrides:
        yield from label_command(name, [*([use] if use else []), *advice.overrides])
    yield from label("" if advice.overrides else name, *filter(None, [advice.change, advice.reason]))


def _format_places(result: Result) -> tuple[str, ...]:
    """Return paths and commands, each in one line however long it is, to be copied."""
    return tuple(f"{name:<{LABEL}}{text}" for name, text in result.places)


def _format_next(name: str, text: str) -> tuple[str, ...]:
    """Return a sentence, or a shell command, whose words stay whole where they have spaces."""
    is_command = text.startswith("pipeline ")
    return label_command(name, [*map(shlex.quote, shlex.split(text))]) if is_command else label(name, text)


def wrap(text: str, *, first: str = "", rest: str = "") -> tuple[str, ...]:
    """Wrap a text between words; ``first`` and ``rest`` are the beginnings of its lines."""
    return tuple(
        textwrap.wrap(
            text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
        )
    )


def label(name: str, *texts: str) -> tuple[str, ...]:
    """Return texts with a label at the left, e.g. "RESULT", each text from a new line on."""
    lines: list[str] = []
    for text in texts:
        lines += wrap(text, first=f"{name if not lines else '':<{LABEL}}", rest=" " * LABEL)
    return tuple(lines)


def label_command(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return a shell command, in words as a shell needs them, with a label at the left, in lines that can be pasted."""
    lines, line = [], ""
    for word in words:
        longer = f"{line} {word}" if line.strip() else f"{line}{word}"
        if line.strip() and len(longer) > WIDTH - LABEL - 2:
            lines.append(f"{line} \\")
            longer = f"  {word}"
        line = longer
    first, *others = (*lines, line)
    return (f"{name:<{LABEL}}{first}", *(f"{'':<{LABEL}}{line}" for line in others))
