"""The numbers of a report for programs: `--json` of `pipeline run` and `pipeline benchmark`, and tables for MLflow."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict

from pipeline.experiment.values import Frozen
from pipeline.protocol.events import Evaluated
from pipeline.protocol.trial_result import Best, Spread, Unsaved
from pipeline.report.numbers.forecast import Forecast, Predicted
from pipeline.report.numbers.row import Advice, Row, Unmeasured
from pipeline.report.numbers.row_numbers import NUMBERS, PREDICTED

_FIRST = (
    *("title", "samples_per_second", "speedup", "efficiency", "same_training"),
    *("speedup_ci_low", "speedup_ci_high"),
)
"""First columns of a table, visible without scrolling."""
_METRICS = ("test/", "validation/", "train/")
"""Prefixes of the columns after them."""
_RAN = ("role", "strategy", "workers", "replicas", "device", "cpus", "global_batch_size", "steps")
"""Columns after the metrics and all other numbers: what ran. Details are last."""
_SHARED = {"strategy", "workers", "title"}
_FACTS = (
    *("title", "role", *_SHARED, "measured", "reason", "predicted", "limited_by"),
    *("spread", "confidence", "slots", "communication", "ranks_ms", "same_training", "gpus", "matmul_precision"),
)
"""Keys of a cell besides its numbers."""

Cell = dict[str, Any]
"""One cell of a comparison for JSON, see `build_cell`."""


def build_cell(entry: Row | Unmeasured | Predicted) -> Cell:
    """Return a cell for JSON: what it is, and all its `NUMBERS`.

    Each cell has all keys; what is unknown, was not measured or is not predicted is None. ``reason`` says why a cell
    was not measured; ``limited_by`` is the main loss of efficiency of a predicted one. ``slots`` has the samples per
    second in each slot or repeat, in order; those of two cells at the same place are a pair.
    """
    keys = dict.fromkeys([*_FACTS, *(number.name for number in NUMBERS if number.name)])
    cell = keys | entry.model_dump(include=_SHARED) | {"measured": False, "predicted": False, "role": "cell"}
    match entry:
        case Unmeasured():
            return cell | {"reason": entry.reason}
        case Predicted():
            numbers = {number.name: number.of(entry) for number in PREDICTED}
            return cell | {"predicted": True, "limited_by": entry.limit} | numbers
    return cell | _build_facts(entry) | _build_numbers(entry)


def _build_facts(row: Row) -> Cell:
    rate = row.samples_per_second
    return {
        "measured": True,
        "spread": {"low": rate.low, "high": rate.high},
        "slots": row.slots if len(row.slots) > 1 else None,
        "ranks_ms": row.parts.ranks_ms,
        "same_training": "yes" if row.role == "baseline" else row.same_training,
        "gpus": row.gpus or None,
        **row.model_dump(include={"role", "confidence", "communication", "matmul_precision"}),
    }


def _build_numbers(row: Row) -> Cell:
    """Return the numbers of a row; those of the baseline itself relative to the baseline are 1 and 0."""
    numbers = {number.name: number.of(row) for number in NUMBERS if number.name}
    if row.role == "baseline":
        numbers |= {number.name: number.of_baseline for number in NUMBERS if number.of_baseline is not None}
    return numbers


class ComparisonRecord(Frozen):
    """Output of `pipeline benchmark FILE --json`."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # a loss that diverged; not all readers of JSON know NaN

    cells: tuple[Cell, ...]
    """Cells in the requested order, the baseline first."""
    reference: Cell | None
    """One process with all cores, if it was measured."""
    forecast: Forecast | None
    """Measurements behind the predicted cells, whose rows are among the cells; None without predictions."""
    advice: tuple[Advice, ...]
    name: str
    hardware: str
    verdict: str
    """Result in one line."""
    remarks: tuple[str, ...]


def build_evaluation(event: Evaluated) -> dict[str, Any]:
    """Return an evaluation that `pipeline evaluate` has added to a run, for JSON, with the keys of `--json` there."""
    names = {"split", "samples", "step", "epoch", "best", "checkpoint", "changes", "values"}
    when = datetime.fromtimestamp(event.time, UTC)
    return {"evaluated": when, **event.model_dump(include=names), "summary": event.subject}


class RunRecord(Frozen):
    """Output of `pipeline run --json`."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    run: str
    """Id of the run, the name of its folder."""
    folder: str
    name: str
    """Name of the experiment."""
    hardware: str
    verdict: str
    """Result in one line, as ``--quiet`` prints it."""
    main: Cell
    """The training."""
    baseline: Cell | None
    """Baseline of the speedup; None with ``--no-baseline``."""
    references: tuple[Cell, ...]
    """One process with all cores, if it was measured."""
    metrics: Mapping[str, float]
    """Last value of each metric of the training."""
    losses: str
    """File with the loss of every step, for ``numpy.load``; empty without one."""
    best: Best | None = None
    """Step that weights and validation metrics are from, if ``checkpoint.best`` chose it."""
    unsaved: Unsaved | None = None
    """Checkpoints that could not be saved, if the last step's or the best may be among them."""
    goodput: Mapping[str, float] | None = None
    """Shares of the wall clock by MLflow's names: ``goodput``, and ``badput/`` for the rest; None if unknown."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """Evaluations of its checkpoints since then, the last one last."""
    remarks: tuple[str, ...]
    advice: tuple[Advice, ...]


def columns(entries: Sequence[Row | Unmeasured | Predicted]) -> dict[str, list[Any]]:
    """Return columns for MLflow's ``log_table``: one value per cell, spreads and metrics flat, None if unknown.

    The first columns and all numbers have a column; other columns have at least one value.
    """
    records = [_flatten(entry) for entry in entries]
    numbers = [number.name for number in NUMBERS if number.name]
    known = dict.fromkeys([*_FIRST, *(name for record in records for name in record), *numbers])
    metrics = [name for prefix in _METRICS for name in known if name.startswith(prefix)]
    names = dict.fromkeys(name for name in (*_FIRST, *metrics, *numbers, *_RAN, *known) if name in known)
    return {name: [record.get(name) for record in records] for name in names}


def table_json(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return columns in the JSON format of MLflow's ``log_table``; a number that JSON does not have is null."""
    rows = [[_finite(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return json.dumps({"columns": list(columns), "data": rows}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(entry: Row | Unmeasured | Predicted) -> dict[str, Any]:
    """Return what is known of an entry without nested values: its fields, numbers and metrics, and ends of spreads."""
    known: dict[str, Any]
    known = {name: value for name, value in entry if isinstance(value, str | int | float) and name != "repeat"}
    for name, spread in entry:
        if isinstance(spread, Spread):
            known |= {f"{name}_low": spread.low, f"{name}_high": spread.high}
    match entry:
        case Row():
            known |= {number.name: number.value(entry) for number in NUMBERS if number.name}
            known |= {} if entry.held is None else {"held_mb": max(entry.held.mb)}
            known |= {} if entry.best is None else {"best_step": entry.best.step}
            known |= {"same_training": entry.same_training} | dict(entry.metrics)
        case Predicted():
            known |= {number.name: number.value(entry) for number in PREDICTED}
    return {name: value for name, value in known.items() if value is not None}
