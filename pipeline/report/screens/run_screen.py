"""The screen of ``pipeline run``: the result, what to do about it, one table, and where to look."""

import shlex
from collections.abc import Iterator

from pipeline.experiment.reported import single_names
from pipeline.protocol.trial import QUICK_STEPS
from pipeline.report.numbers.row import FIRST_STEPS, Row
from pipeline.report.report import Report
from pipeline.report.screens.screen_layout import (
    Block,
    Places,
    assemble,
    assemble_first_fit,
    label,
    label_command,
    wrap,
)
from pipeline.report.screens.screen_parts import format_doubt, format_invalid, format_places, shorten_hardware
from pipeline.report.screens.screen_tables import format_step_time, iter_tables
from pipeline.report.text.claims import BUSY, Doubt, Outcome, classify_speedup, compare_rows, explain_doubt, headline
from pipeline.report.text.loss_differences import format_most
from pipeline.report.text.ratios import is_wide
from pipeline.report.text.row_names import are_several, count_workers, name_row
from pipeline.report.text.sentences import format_advice, iter_metric_names, iter_training_notes
from pipeline.report.text.tables import amount, efficiency, low_to_high
from pipeline.wording import counted, figure

_MOST_NOTES = 3
_MOST_METRICS = 4
_LAUNCHERS = {"ray": "Ray", "inprocess": "in this process"}
"""Launchers in words."""


def format_screen(report: Report, places: Places) -> tuple[str, ...]:
    """Return the lines of the screen that ends ``pipeline run``."""
    if report.is_quick:
        return _format_quick(report, places)
    main, baseline = report.main, report.rows[0]
    outcome = classify_speedup(main, baseline)
    doubt = explain_doubt(main, main=main, baseline=baseline) if outcome == "inconclusive" else None
    advised = () if outcome == "invalid" or (doubt and doubt.command) else tuple(_use(report))
    has_table = len(report.entries) > 1
    step_time = () if outcome == "invalid" or any("exposed" in line for line in advised) else format_step_time(main)
    above = [
        Block(wrap(_title(report), rest="  ")),
        Block((*_result(report, outcome), *label("", *iter_training_notes(main, report.training_notes)))),
        Block((*format_doubt(doubt, places), *format_invalid(outcome, places), *advised)),
    ]
    between = [
        Block(() if advised else tuple(_reference(report, outcome)), rank=2),
        Block(step_time, rank=3),
    ]
    below = [
        Block(tuple(_notes(report, doubt=doubt, has_advice=bool(advised))), rank=1),
        Block(format_places(places)),
    ]
    tables = iter_tables(report, places) if has_table else [(Block(()), Block(()))]
    return assemble_first_fit([*above, table, *between, losses, *below] for table, losses in tables)


def _title(report: Report) -> str:
    main = report.main
    ended = "training stopped early" if main.stopped_early else "training completed"
    epochs = f"{counted(main.epochs, 'epoch')}, " if main.epochs else ""
    steps = counted(main.steps, "step", spec=",")
    return f"{report.name}: {ended} ({epochs}{steps}; {shorten_hardware(report.hardware)})"


def _result(report: Report, outcome: Outcome) -> Iterator[str]:
    main, baseline = report.main, report.rows[0]
    metrics = format_metrics(main)
    if outcome == "invalid":
        most = format_most(main.first_loss_difference)
        subject, base = count_workers(main), count_workers(baseline)
        yield from label(
            "WARNING",
            f"The speedup is not valid: {subject} {'do' if are_several(main) else 'does'} not train the same model as "
            f"{base}. Their losses differ by {most} within the first {FIRST_STEPS} steps; rounding "
            f"explains at most {amount(main.loss_tolerance)}.",
            *metrics,
        )
    elif outcome == "none":
        yield from label("RESULT", *metrics, _describe_missing(report))
    else:
        yield from label("RESULT", *headline(main, baseline, efficiency=efficiency(main)), *metrics)


def _describe_missing(report: Report) -> str:
    """Say why there is no speedup, with the throughput."""
    main = report.main
    rate = f"{name_row(main)}: {amount(main.samples_per_second.median)} samples/s"
    reason = report.restriction.partition(":")[0]  # an option of the command
    if main.is_one_replica_dp:
        reason = reason or "DataParallel has one device here"
    elif main.measures_again(report.rows[0]):
        reason = reason or "the baseline is the same training"
    return f"{rate}. Speedup not measured{f' ({reason})' if reason else ''}"


def format_metrics(row: Row) -> tuple[str, ...]:
    """Return the final metrics in a line, the test set's first; a metric of many values is left to the report."""
    names = single_names(iter_metric_names(row))
    shown = ", ".join(f"{name} {figure(row.metrics[name])}" for name in names[:_MOST_METRICS])
    when = "last epoch" if row.best is None else f"weights of step {row.best.step:,}, the best {row.best.metric}"
    return (f"{shown} ({when})",) if shown else ()


def _use(report: Report) -> Iterator[str]:
    """Yield the settings that this run has measured to be better, and why."""
    advice = next((one for one in report.advice if one.measured and one.overrides), None)
    if advice is None:
        return
    name = [f"{advice.use}:"] if advice.use else []
    yield from label_command("USE", [*name, *map(shlex.quote, shlex.split(advice.overrides))])
    if advice.why:
        yield from label("", advice.why)


def _reference(report: Report, outcome: Outcome) -> Iterator[str]:
    """Yield how the training compares with one process on the same cores."""
    if outcome not in ("faster", "inconclusive"):
        return
    for row in report.rows:
        if row.role == "reference" and row.cpus >= report.main.cpus and row.device == "cpu":
            yield from wrap(compare_rows(report.main, row))


def _notes(report: Report, *, doubt: Doubt | None, has_advice: bool) -> Iterator[str]:
    """Yield notes that change what a reader would do, the most important first."""
    main = report.main
    notes = [f"{note[0].upper()}{note[1:]}." for note in main.data_notes]
    has_wide = any(row.ratio is not None and is_wide(row.ratio) for row in report.rows)
    if doubt is None and has_wide and main.other_cores is not None and main.other_cores > BUSY:
        notes.append(
            f"Other processes used {main.other_cores:.1f} CPU cores during the measurement. Train again on an "
            "idle machine for narrower intervals."
        )
    others = (one for one in report.advice if not (one.measured and one.overrides))  # which is behind USE
    if doubt is None and (other := next(others, None)) and (other.measured or not has_advice):
        (line,) = format_advice([other])
        notes.append(f"{line[0].upper()}{line[1:]}")
    for note in notes[:_MOST_NOTES]:
        yield from wrap(note)


def _format_quick(report: Report, places: Places) -> tuple[str, ...]:
    main = report.main
    launcher = _LAUNCHERS.get(report.launcher, report.launcher)
    run = [counted(main.workers, "worker"), main.strategy, *([launcher] if launcher else [])]
    hardware = shorten_hardware(report.hardware)
    facts = {
        "startup time": ""
        if main.time_to_first_step_s is None
        else f"{main.time_to_first_step_s:.1f} s (from launch to the end of the first step)",
        "peak memory": f"{low_to_high(main.peak_memory_mb)} MiB per {'worker' if main.device == 'cpu' else 'GPU'}"
        if main.peak_memory_mb
        else "",
    }
    again = [word for word in places.command.split() if word != "--quick"]
    return assemble(
        [
            Block(wrap(f"{report.name}: quick test passed ({', '.join(run)}; {hardware})", rest="  ")),
            Block(
                wrap(
                    f"Trained {QUICK_STEPS} steps, evaluated once and saved a checkpoint. The model is not trained, "
                    "and the speedup was not measured."
                )
            ),
            Block(tuple(f"  {name:<18}{text}" for name, text in facts.items() if text)),
            Block(
                (
                    f"Run folder   {places.folder}",
                    *((f"Full run     {' '.join(again)}",) if again else ()),
                )
            ),
        ]
    )
