"""The screen of ``pipeline compare``: the answer, what differs, the pairs in a table, the answer again."""

from collections.abc import Iterator

from pipeline.report.compared import Compared
from pipeline.report.screens.screen_layout import Block, Column, Places, assemble, label, lay_out, wrap

_MOST_PAIRS, _MOST_SETTINGS, _MOST_NOTES = 10, 3, 3


def format_screen(compared: Compared, places: Places) -> tuple[str, ...]:
    """Return the lines of the screen that ends ``pipeline compare``."""
    answers = [line for answer in compared.answers or (compared.verdict,) for line in wrap(answer)]
    return assemble(
        [
            Block(tuple(answers)),
            Block((*wrap(compared.opening[1]), *_variants(compared))),
            Block(tuple(_settings(compared)), rank=3),
            Block(tuple(line for time in compared.times for line in label("TIME", time))),
            *(Block(table, rank=2) for table in _tables(compared)),
            Block(tuple(_notes(compared)), rank=1),
            Block((*label("Scope", *compared.claims), *_places(compared, places))),
            Block(tuple(answers), rank=4 if len(compared.others) > 1 else 0),  # several answers don't fit twice
        ]
    )


def _variants(compared: Compared) -> Iterator[str]:
    for one in (compared.first, *(other.variant for other in compared.others)):
        yield from label(one.name, one.description)


def _settings(compared: Compared) -> Iterator[str]:
    """Yield the settings that differ, unless they describe the variants already."""
    described = compared.first.description
    lines = [line for line in compared.differing if f"{line.partition(':')[0]}=" not in described]
    for line in lines[:_MOST_SETTINGS]:
        yield from wrap(f"differs: {line}", rest="  ")[:2]
    if (more := len(lines) - _MOST_SETTINGS) > 0:
        yield f"differs: {more} more"


def _tables(compared: Compared) -> Iterator[tuple[str, ...]]:
    for table in compared.tables:
        rows = table.rows[:_MOST_PAIRS]
        columns = [Column(head, tuple(row[index] for row in rows)) for index, head in enumerate(table.header)]
        more = len(table.rows) - len(rows)
        yield (*lay_out(columns), *([f"{more} more pairs"] if more else []))


def _notes(compared: Compared) -> Iterator[str]:
    for note in compared.notes[:_MOST_NOTES]:
        yield from wrap(f"note: {note}", rest="  ")
    if (more := len(compared.notes) - _MOST_NOTES) > 0:
        yield f"note: {more} more in the report"


def _places(compared: Compared, places: Places) -> Iterator[str]:
    if compared.left:
        yield from label("Resume", f"{compared.left} trainings are left; --resume {places.run} continues them")
    if places.page:
        yield from label("Report", places.page)
    if places.mlflow:
        yield from label("MLflow", places.mlflow)
