"""The figures of a report for programs: `--json` of `pipeline run` and `compare`, and MLflow's tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict

from pipeline.config.values import Frozen
from pipeline.protocol.trial import Role, Scaling
from pipeline.report import Advice, Row, Unmeasured

_LEADING = ("title", "samples_per_second", "speedup", "efficiency", "same_training")
"""The columns of a table that stand first: what is seen without scrolling."""


class Range(Frozen):
    """The lowest and the highest of several measurements."""

    low: float
    high: float


class CellRecord(Frozen):
    """One cell of a comparison; all figures are None where it is not measured."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # a loss that diverged; not all readers of JSON know NaN

    strategy: str
    workers: int
    """Processes (world size)."""
    scaling: Scaling
    measured: bool
    reason: str | None = None
    """Why it is not measured."""
    samples_per_second: float | None = None
    speedup: float | None = None
    """Throughput over the baseline's; 1 for the baseline itself; None where no speedup may be claimed."""
    efficiency: float | None = None
    spread: Range | None = None
    """Of samples per second."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    step_ms: float | None = None
    exposed_communication_ms: float | None = None
    data_wait_ms: float | None = None
    peak_memory_mb: tuple[float, ...] | None = None
    """Of each device."""
    time_to_first_step_s: float | None = None
    compile_s: float | None = None
    """Seconds that torch.compile took; in no other figure but the time to the first step."""
    largest_loss_difference: float | None = None
    title: str
    role: Role
    compute_ms: float | None = None
    rest_ms: float | None = None
    same_training: str | None = None
    gpu_utilization: tuple[float, ...] | None = None
    """Percent, of each GPU; None on CPU."""
    unexplained_ms: float | None = None
    """What a step takes longer than its parts, negative if shorter; 0 within the noise."""
    ranks_ms: tuple[float, ...] | None = None

    @classmethod
    def of(cls, entry: Row | Unmeasured) -> "CellRecord":
        """The record of a cell, measured or not."""
        shared = entry.model_dump(include={"strategy", "workers", "scaling", "title"})
        if isinstance(entry, Unmeasured):
            return cls(**shared, measured=False, reason=entry.reason, role="cell")
        rate = entry.samples_per_second
        return cls(
            measured=True,
            samples_per_second=rate.median,
            spread=Range(low=rate.low, high=rate.high),
            step_ms=entry.step_ms.median,
            gpu_utilization=entry.gpu_utilization or None,
            ranks_ms=entry.parts.ranks_ms,
            unexplained_ms=entry.unexplained_ms,
            **shared,
            **_relative(entry),
            **entry.model_dump(include={"role", "peak_memory_mb", "time_to_first_step_s", "compile_s"}),
            **entry.parts.model_dump(include={"compute_ms", "exposed_communication_ms", "data_wait_ms", "rest_ms"}),
        )


class ComparisonRecord(Frozen):
    """What `pipeline compare --json` prints."""

    cells: tuple[CellRecord, ...]
    """In the order they were asked for, the baseline first."""
    reference: CellRecord | None
    """One process with all the cores, where that was measured."""
    advice: tuple[Advice, ...]
    name: str
    hardware: str
    remarks: tuple[str, ...]


class RunRecord(Frozen):
    """What `pipeline run --json` prints."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    run: str
    """Its id, the name of its folder."""
    folder: str
    name: str
    """Name of the experiment."""
    hardware: str
    main: CellRecord
    """The training."""
    baseline: CellRecord | None
    """What its speedup is relative to; None with ``--no-baseline``."""
    references: tuple[CellRecord, ...]
    """One process with all the cores, where that was measured."""
    metrics: Mapping[str, float]
    """The last value of each metric of the training."""
    remarks: tuple[str, ...]
    advice: tuple[Advice, ...]


def columns(entries: Sequence[Row | Unmeasured]) -> dict[str, list[Any]]:
    """Columns for MLflow's ``log_table``: one entry per cell, spreads and metrics flat, None where unknown."""
    records = [_flat(entry) if isinstance(entry, Row) else entry.model_dump() for entry in entries]
    known = dict.fromkeys(name for record in records for name in record)
    names = [*(name for name in _LEADING if name in known), *(name for name in known if name not in _LEADING)]
    return {name: [record.get(name) for record in records] for name in names}


def _relative(row: Row) -> dict[str, Any]:
    """What relates a row to the baseline, which is equal to itself."""
    ratios = {"speedup", "efficiency", "speedup_low", "speedup_high"}
    if row.role == "baseline":
        return dict.fromkeys(ratios, 1.0) | {"largest_loss_difference": 0.0, "same_training": "yes"}
    return row.model_dump(include={*ratios, "largest_loss_difference"}) | {"same_training": row.same_training}


def _flat(row: Row) -> dict[str, Any]:
    listed = {"metrics", "options", "parts", "peak_memory_mb", "gpu_utilization", "losses", "repeats", "coupling"}
    times = row.parts.model_dump(include={"compute_ms", "exposed_communication_ms", "data_wait_ms", "rest_ms"})
    record: dict[str, Any] = {}
    for name, value in row.model_dump(mode="json", exclude=listed | {"held"}).items():
        if isinstance(value, dict):  # a spread
            record |= {name: value["median"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            record[name] = value
    held = row.held.mb if row.held else ()
    peaks = {"peak_memory_mb": max(row.peak_memory_mb, default=None), "held_mb": max(held, default=None)}
    return record | times | peaks | {"same_training": row.same_training} | dict(row.metrics)
