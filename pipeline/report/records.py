"""The numbers of a report for programs: `--json` of `pipeline run` and `pipeline benchmark`, and tables for MLflow."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict

from pipeline.config.values import Frozen
from pipeline.protocol.events import Evaluated
from pipeline.protocol.trial import Role, Scaling, Split
from pipeline.protocol.trial_result import Best, Communication, Unsaved
from pipeline.report import Advice, Row, Unmeasured, device
from pipeline.report.forecast import Forecast, Predicted

_RESULT = ("title", "samples_per_second", "speedup", "efficiency", "same_training", "speedup_ci_low", "speedup_ci_high")
"""First columns of a table, visible without scrolling."""
_METRICS = ("test/", "validation/", "train/")
"""Prefixes of the columns after them."""
_USED = (
    *("step_ms", "compute_ms", "exposed_communication_ms", "data_wait_ms", "rest_ms", "time_to_first_step_s"),
    *("peak_memory_mb", "tflops", "mfu", "energy_kwh", "energy_j_per_sample", "cost"),
    *("role", "strategy", "workers", "replicas", "device", "cpus", "scaling", "global_batch_size", "steps"),
)
"""Columns after the metrics: time and resources that were used, and what ran. Details are last."""
_TIMES = {"compute_ms", "exposed_communication_ms", "data_wait_ms", "rest_ms"}
_AS_IN_ROW = {"role", "confidence", "peak_memory_mb", "time_to_first_step_s", "compile_s", "matmul_precision"}


class Range(Frozen):
    """Lowest and highest of several measurements."""

    low: float
    high: float


class CellRecord(Frozen):
    """One cell of a comparison; all figures are None if it was not measured."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # a loss that diverged; not all readers of JSON know NaN

    strategy: str
    workers: int
    """Processes (world size)."""
    scaling: Scaling
    measured: bool
    reason: str | None = None
    """Explanation if it was not measured."""
    predicted: bool = False
    """True if the figures are predicted; ``measured`` is false then."""
    limited_by: str | None = None
    """Main loss of efficiency, if predicted."""
    samples_per_second: float | None = None
    speedup: float | None = None
    """Throughput over the baseline's; 1 for the baseline itself; None if no speedup can be claimed."""
    efficiency: float | None = None
    spread: Range | None = None
    """Range of samples per second."""
    speedup_ci_low: float | None = None
    speedup_ci_high: float | None = None
    """Ends of the interval of the speedup."""
    speedup_rounds: int | None = None
    """Pairs of slots or repeats behind the interval; 0 if it is only the range of windows."""
    confidence: float | None = None
    """Confidence level of the interval."""
    slots: tuple[float, ...] | None = None
    """Samples per second in each slot or repeat, in order; those of two trials at the same place are a pair."""
    step_ms: float | None = None
    exposed_communication_ms: float | None = None
    data_wait_ms: float | None = None
    communication: Communication | None = None
    """Gradient exchange while it trained, overlap included, with its spikes; None where it wasn't timed."""
    peak_memory_mb: tuple[float, ...] | None = None
    """Peak memory of each device."""
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    """Seconds of torch.compile, also contained in the time to the first step, but in no other figure."""
    largest_loss_difference: float | None = None
    title: str
    role: Role
    compute_ms: float | None = None
    rest_ms: float | None = None
    same_training: str | None = None
    gpus: tuple[str, ...] | None = None
    """Name of each GPU; None on CPU."""
    matmul_precision: str | None = None
    """Precision of fp32 matrix products, see ``train.matmul_precision``."""
    gpu_utilization: tuple[float, ...] | None = None
    """Utilization of each GPU in percent; None on CPU."""
    tflops: float | None = None
    """TFLOP/s of all devices at this throughput."""
    mfu: float | None = None
    """Share of the devices' peak (model FLOPs utilization); None where the peak isn't known."""
    energy_kwh: float | None = None
    """Energy that the GPUs of a training took; None where they don't count it."""
    energy_j_per_sample: float | None = None
    cost: float | None = None
    """Price of the whole training; None without ``benchmark.price_per_device_hour``."""
    unexplained_ms: float | None = None
    """Milliseconds of a step beyond the sum of its parts, negative if the sum is larger; 0 within noise."""
    ranks_ms: tuple[float, ...] | None = None

    @classmethod
    def of(cls, entry: Row | Unmeasured | Predicted) -> "CellRecord":
        """Build the record of a cell, measured, predicted or neither."""
        shared = entry.model_dump(include={"strategy", "workers", "scaling", "title"})
        if isinstance(entry, Unmeasured):
            return cls(**shared, measured=False, reason=entry.reason, role="cell")
        if isinstance(entry, Predicted):
            return cls(
                measured=False,
                predicted=True,
                limited_by=entry.limit,
                role="cell",
                samples_per_second=entry.samples_per_second.median,
                step_ms=entry.step_ms.median,
                **shared,
                **entry.model_dump(include={"speedup", "efficiency", "cost"}),
                **entry.parts.model_dump(include=_TIMES),
            )
        rate = entry.samples_per_second
        return cls(
            measured=True,
            samples_per_second=rate.median,
            spread=Range(low=rate.low, high=rate.high),
            slots=entry.slots if len(entry.slots) > 1 else None,
            step_ms=entry.step_ms.median,
            communication=entry.communication,
            gpus=entry.gpus or None,
            gpu_utilization=entry.gpu_utilization or None,
            ranks_ms=entry.parts.ranks_ms,
            unexplained_ms=entry.unexplained_ms,
            **shared,
            **_relative(entry),
            **device.figures(entry),
            **entry.model_dump(include=_AS_IN_ROW),
            **entry.parts.model_dump(include=_TIMES),
        )


class ComparisonRecord(Frozen):
    """Output of `pipeline benchmark FILE --json`."""

    cells: tuple[CellRecord, ...]
    """Cells in the requested order, the baseline first."""
    reference: CellRecord | None
    """One process with all cores, if it was measured."""
    forecast: Forecast | None
    """Measurements behind the predicted cells, whose rows are among the cells; None without predictions."""
    advice: tuple[Advice, ...]
    name: str
    hardware: str
    verdict: str
    """Result in one line."""
    remarks: tuple[str, ...]


class EvaluationRecord(Frozen):
    """Evaluation of a checkpoint that `pipeline evaluate` has added to a run; its keys are those of `--json` there."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    evaluated: datetime
    split: Split
    samples: int
    step: int
    epoch: int
    best: str
    checkpoint: str
    changes: tuple[str, ...]
    values: Mapping[str, float]
    summary: str

    @classmethod
    def of(cls, event: Evaluated) -> "EvaluationRecord":
        """Build the record from the event."""
        names = {"split", "samples", "step", "epoch", "best", "checkpoint", "changes", "values"}
        when = datetime.fromtimestamp(event.time, UTC)
        return cls(evaluated=when, summary=event.subject, **event.model_dump(include=names))


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
    main: CellRecord
    """The training."""
    baseline: CellRecord | None
    """Baseline of the speedup; None with ``--no-baseline``."""
    references: tuple[CellRecord, ...]
    """One process with all cores, if it was measured."""
    metrics: Mapping[str, float]
    """Last value of each metric of the training."""
    best: Best | None = None
    """Step that weights and validation metrics are from, if ``checkpoint.best`` chose it."""
    unsaved: Unsaved | None = None
    """Checkpoints that could not be saved, if the last step's or the best may be among them."""
    goodput: Mapping[str, float] | None = None
    """Shares of the wall clock by MLflow's names: ``goodput``, and ``badput/`` for the rest; None if unknown."""
    evaluations: tuple[EvaluationRecord, ...] = ()
    """Evaluations of its checkpoints since then, the last one last."""
    remarks: tuple[str, ...]
    advice: tuple[Advice, ...]


def columns(entries: Sequence[Row | Unmeasured | Predicted]) -> dict[str, list[Any]]:
    """Return columns for MLflow's ``log_table``: one value per cell, spreads and metrics flat, None if unknown."""
    records = [_flat(entry) if isinstance(entry, Row) else _flat_spreads(entry) for entry in entries]
    known = dict.fromkeys(name for record in records for name in record)
    metrics = [name for prefix in _METRICS for name in known if name.startswith(prefix)]
    names = dict.fromkeys(name for name in (*_RESULT, *metrics, *_USED, *known) if name in known)
    return {name: [record.get(name) for record in records] for name in names}


def table_json(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return columns in the JSON format of MLflow's ``log_table``; a number that JSON does not have is null."""
    rows = [[_finite(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return json.dumps({"columns": list(columns), "data": rows}, allow_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _relative(row: Row) -> dict[str, Any]:
    """Return the figures relative to the baseline; those of the baseline itself are 1 and 0."""
    ratios = {"speedup", "efficiency", "speedup_ci_low", "speedup_ci_high"}
    if row.role == "baseline":
        return dict.fromkeys(ratios, 1.0) | {"largest_loss_difference": 0.0, "same_training": "yes"}
    figures = row.model_dump(include={*ratios, "speedup_rounds", "largest_loss_difference"})
    return figures | {"same_training": row.same_training}


def _flat(row: Row) -> dict[str, Any]:
    listed = {
        "metrics",
        "options",
        "parts",
        "peak_memory_mb",
        "gpu_utilization",
        "losses",
        "slots",
        "costs",
        "repeat",
        "coupling",
        "data_notes",
        "unsaved",
        "gpus",
        "communication",
        "flops",
        "energy",
    }
    record = _flat_spreads(row, without=listed | {"held", "best"})
    held = row.held.mb if row.held else ()
    peaks = {"peak_memory_mb": max(row.peak_memory_mb, default=None), "held_mb": max(held, default=None)}
    best = {} if row.best is None else {"best_step": row.best.step}
    return record | peaks | device.figures(row) | best | {"same_training": row.same_training} | dict(row.metrics)


def _flat_spreads(entry: Row | Unmeasured | Predicted, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of an entry without nested values: spreads as numbers, and the parts of its step."""
    record: dict[str, Any] = {}
    for name, value in entry.model_dump(mode="json", exclude={*without, "parts"}).items():
        if isinstance(value, dict):  # a spread
            record |= {name: value["median"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            record[name] = value
    return record if isinstance(entry, Unmeasured) else record | entry.parts.model_dump(include=_TIMES)
