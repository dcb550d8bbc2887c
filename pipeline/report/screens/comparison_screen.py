"""The screen of ``pipeline benchmark FILE``: the configuration with most workers, the fastest one, and two tables."""

import shlex
from collections.abc import Iterator

from pipeline.report.numbers.row import Row
from pipeline.report.report import Report
from pipeline.report.screens.screen_layout import Block, Places, assemble_first_fit, label, label_command, wrap
from pipeline.report.screens.screen_parts import format_doubt, format_invalid, format_places, shorten_hardware
from pipeline.report.screens.screen_tables import format_step_times, iter_tables
from pipeline.report.text.claims import classify_speedup, describe_speedup, explain_doubt, headline
from pipeline.report.text.ratios import is_wide
from pipeline.report.text.row_names import name_row
from pipeline.report.text.sentences import find_fastest
from pipeline.report.text.tables import amount, efficiency
from pipeline.wording import counted

_FEW_REPEATS = 10
"""Repeats that a wide interval is to be measured with."""


def format_screen(report: Report, places: Places) -> tuple[str, ...]:
    """Return the lines of the screen that ends ``pipeline benchmark FILE``."""
    main, baseline = report.main, report.rows[0]
    outcome = classify_speedup(main, baseline)
    doubt = explain_doubt(main, main=main, baseline=baseline) if outcome == "inconclusive" else None
    decision = (*format_doubt(doubt, places), *format_invalid(outcome, places))
    above = [Block(wrap(_title(report), rest="  ")), Block((*_result(report), *decision))]
    below = [
        Block(() if outcome == "invalid" else format_step_times(report.rows), rank=2),
        Block(tuple(_missing(report)), rank=1),
        Block(tuple(_basis(report)), rank=1),
        Block((*(() if doubt else _noise(report)), *_use(report), *format_places(places))),
    ]
    return assemble_first_fit([*above, table, losses, *below] for table, losses in iter_tables(report, places))


def _title(report: Report) -> str:
    repeats = counted(max(len(row.repeats) for row in report.rows), "repeat")
    measured = counted(len(report.rows), "configuration")
    hardware = shorten_hardware(report.hardware).removesuffix(", no GPU")
    return f"{report.name}: benchmark completed ({measured}, {repeats}; {hardware})"


def _result(report: Report) -> Iterator[str]:
    main, baseline = report.main, report.rows[0]
    fastest = find_fastest(report.rows)
    rate = "" if fastest is None else f"{amount(fastest.samples_per_second.median)} samples/s"
    best = [] if fastest is None else [f"Fastest: {name_row(fastest)}, {rate}"]
    match classify_speedup(main, baseline):
        case "none":
            rate = amount(main.samples_per_second.median)
            yield from label("RESULT", f"{name_row(main)}: {rate} samples/s. Speedup not measured", *best)
        case "invalid":
            yield from label("WARNING", f"{describe_speedup(main, baseline)}.", *best)
        case _:
            yield from label("RESULT", *headline(main, baseline, efficiency=efficiency(main)), *best)


def _missing(report: Report) -> Iterator[str]:
    """Yield why configurations were not measured."""
    for cell in report.unmeasured[:2]:
        yield from wrap(f"{name_row(cell)}: not measured, {cell.reason.rstrip('.')}.")


def _basis(report: Report) -> Iterator[str]:
    """Yield what predicted rows are based on, and how far off the prediction is where it was measured."""
    for note in report.forecast.notes[:2] if report.forecast else ():
        yield from wrap(note)


def _noise(report: Report) -> Iterator[str]:
    if any(_is_noisy(row) for row in report.rows):
        yield from wrap(f"Some intervals are wide. Measure again on an idle machine, or with --repeats {_FEW_REPEATS}.")


def _is_noisy(row: Row) -> bool:
    return row.ratio is not None and row.ratio.size > 0 and is_wide(row.ratio) and row.ratio.size < _FEW_REPEATS


def _use(report: Report) -> Iterator[str]:
    advice = next((one for one in report.advice if one.measured and one.overrides), None)
    if advice is not None:
        yield from label_command("USE", [*map(shlex.quote, shlex.split(advice.overrides))])
        if "batch_size" in advice.overrides:
            yield from label("", "This changes the training. Check that the model trains as well.")
