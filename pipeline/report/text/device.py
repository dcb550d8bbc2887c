"""Use of the devices: operations per second and their share of the peak (MFU), utilization, energy, and price."""

from collections.abc import Iterator, Sequence
from statistics import mean

from pipeline.report.numbers.forecast import Predicted
from pipeline.report.numbers.old_breakdown import has_consistent_parts
from pipeline.report.numbers.row import Row, find_main_row
from pipeline.report.numbers.row_numbers import mfu, tflops, without_peak
from pipeline.report.text.row_names import name_row
from pipeline.report.text.tables import Column, amount, training_s
from pipeline.wording import figure

BUSY = 90.0
"""Percent of GPU utilization below which the report names the cause."""
_EXPLAINS = 0.5
"""Share of the idle time that a part of a step has to have, to be its cause."""


def use(row: Row) -> Iterator[str]:
    """Yield sentences on how a training used its devices, as far as that is known."""
    if (reached := tflops(row)) is not None:
        yield f"{rate(reached)} on {row.devices}{_share_of_peak(row)}{_uncounted(row)}"
    if row.gpu_utilization and (busy := mean(row.gpu_utilization)) < BUSY:
        yield f"GPUs are busy {busy:.0f}% of the time: {_cause(row, idle=1 - busy / 100)}"
    if (energy := row.energy) is not None:
        part = f" since it was resumed, for {energy.samples:,} samples" if energy.samples < row.whole_training else ""
        yield f"{figure(energy.kwh, digits=3)} kWh{part}, {figure(energy.joules_per_sample, digits=3)} J per sample"


def completed(rows: Sequence[Row], *, price: float | None) -> list[Row]:
    """Return the rows with the operations of a sample, which one of them counted for all, and with their costs.

    A row's cost is ``price`` times the device-hours of the whole training, the start included.
    """
    flops = next((row.flops for row in rows if row.flops), None)
    start_s = find_main_row(rows).time_to_first_step_s or 0.0
    return [
        row.model_copy(update={"flops": row.flops or flops, "cost": compute_cost(row, price, start_s=start_s)})
        for row in rows
    ]


def compute_cost(row: Row | Predicted, price: float | None, *, start_s: float) -> float | None:
    """Return what the whole training costs with a row; None without a price. ``start_s``: startup if it has none."""
    if price is None or not row.whole_training:
        return None
    return price * row.device_count * training_s(row, start_s=start_s) / 3600


def costs(rows: Sequence[Row | Predicted], *, price: float | None) -> Iterator[str]:
    """Yield what the training costs with each row, if there is a price."""
    listed = [f"{figure(row.cost, digits=2)} with {name_row(row)}" for row in rows if row.cost is not None]
    if price is not None and listed:
        unit = "core" if rows[0].device == "cpu" else "GPU"
        yield f"this training costs {', '.join(listed)}, at {figure(price)} per {unit} and hour"


def columns(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns of a comparison, as far as any row has a figure: operations per second, MFU."""
    known = [reached for row in rows if (reached := tflops(row)) is not None]
    if not known:
        return []
    unit, factor = ("TFLOP/s", 1) if max(known) >= 1 else ("GFLOP/s", 1000)
    found: list[Column[Row]] = [(unit, lambda row: amount(factor * (tflops(row) or 0.0)))]
    if any(mfu(row) is not None for row in rows):
        found.append(("MFU", lambda row: share(mfu(row))))
    return found


def rate(value: float) -> str:
    """Format TFLOP/s, those below 1 as GFLOP/s."""
    return f"{amount(value)} TFLOP/s" if value >= 1 else f"{amount(1000 * value)} GFLOP/s"


def share(value: float | None) -> str:
    """Format a share of the peak."""
    return "-" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _share_of_peak(row: Row) -> str:
    if (reached := mfu(row)) is not None:
        least = "at least " if row.flops and row.flops.uncounted else ""
        return f", {least}{share(reached)} of their peak (MFU)"
    return f", no MFU: the peak of {without_peak(row)[0]} is not known" if row.gpus else ""


def _uncounted(row: Row) -> str:
    names = row.flops.uncounted if row.flops else ()
    return f"; not counted: {', '.join(names)}" if names else ""


def _cause(row: Row, *, idle: float) -> str:
    """Return what the parts of a step say about idle GPUs."""
    parts = row.parts
    if parts.rest_ms is None or not has_consistent_parts(row):
        return "the cause is unknown, as there is no step-time breakdown"
    ms = {
        "data loading": parts.data_wait_ms,
        "exposed communication": parts.exposed_communication_ms or 0.0,
        "the optimizer and other work": parts.rest_ms,
    }
    most = max(ms, key=ms.__getitem__)
    if (taken := ms[most] / row.step_ms.median) >= _EXPLAINS * idle:
        return f"{most} takes {taken:.0%} of a step"
    return (
        "forward and backward leave them idle themselves, with kernels that take less time than their launch; larger "
        "batches per device or train.compile would help"
    )
