"""The screen of ``pipeline evaluate``: the values of a checkpoint, a small confusion matrix, and where to look."""

import re
from collections.abc import Iterator, Mapping

from pipeline.experiment.reported import group_by_metric, single_names
from pipeline.report.evaluated import EvaluationReport
from pipeline.report.screens.screen_layout import Block, Column, Places, assemble, label, lay_out, wrap
from pipeline.wording import counted, figure

_CELL = re.compile(r"(.*)_true_(\d+)_predicted_(\d+)\Z")
_CLASS = re.compile(r"(.*)_(\d+)\Z")
_MOST_CLASSES = 10
"""Classes of the largest table that a screen has room for."""


def format_screen(report: EvaluationReport, places: Places) -> tuple[str, ...]:
    """Return the lines of the screen that ends ``pipeline evaluate``."""
    workers = f"{counted(report.workers, 'worker')}{'' if report.strategy == 'single' else f', {report.strategy}'}"
    samples = counted(report.samples, "sample", spec=",")
    title = f"{report.name}: evaluation completed ({report.split} set, {samples}; {workers})"
    tables, hidden = _tables(report.values)
    return assemble(
        [
            Block(wrap(title, rest="  ")),
            Block(label("RESULT", *_result(report))),
            *(Block(table, rank=1) for table in tables),
            Block(tuple(line for note in (*_notes(report), *hidden) for line in wrap(note))),
            Block((*label("Folder", places.folder), *label("More", f"pipeline show {places.run} --full"))),
        ]
    )


def _result(report: EvaluationReport) -> Iterator[str]:
    ordered = sorted(single_names(report.values), key=lambda name: name.endswith("/loss"))
    if ordered:
        yield ", ".join(f"{name} {figure(report.values[name])}" for name in ordered)
    best = f", the best {report.best}" if report.best else ""
    yield f"Weights of step {report.step:,} (epoch {report.epoch}){best}"


def _notes(report: EvaluationReport) -> Iterator[str]:
    if report.note:
        yield f"{report.note[0].upper()}{report.note[1:]}."
    if report.is_fallback:
        yield "The data has no test set, so this is the validation set."
    for change in report.changes:
        yield f"Not the experiment that was trained: {change}."


def _tables(values: Mapping[str, float]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the metrics of many values as tables, and a note on each that is too large for one."""
    tables, hidden = [], []
    for metric, names in group_by_metric(values).items():
        if len(names) == 1:
            continue
        table = _matrix(metric, values) or _classes(metric, values)
        if table:
            tables.append(table)
        else:
            hidden.append(f"{metric} has {len(names)} values: see pipeline evaluate --json.")
    return tables, hidden


def _matrix(metric: str, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return a confusion matrix as a table; empty for another metric, or one of too many classes."""
    found = {
        (int(cell[2]), int(cell[3])): value
        for name, value in values.items()
        if (cell := _CELL.match(name)) and cell[1] == metric
    }
    classes = sorted({true for true, _ in found})
    if not found or len(classes) > _MOST_CLASSES:
        return ()
    columns = [Column("true \\ predicted", tuple(map(str, classes)))]
    columns += [Column(str(other), tuple(figure(found[true, other]) for true in classes)) for other in classes]
    return (metric, *lay_out(columns))


def _classes(metric: str, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the values of each class as a table of two lines; empty for another metric, or too many classes."""
    found = {cell[2]: value for name, value in values.items() if (cell := _CLASS.match(name)) and cell[1] == metric}
    if not found or len(found) > _MOST_CLASSES:
        return ()
    columns = [Column("class", ("",))]
    columns += [Column(name, (figure(value),)) for name, value in found.items()]
    return (metric, *lay_out(columns))
