"""The numbers of a row, each defined once: JSON, the tables and MLflow's metrics take them from here.

To add one that a trial measures, see `pipeline.protocol.numbers`.
"""

from collections.abc import Iterable

from pipeline.protocol.numbers import MEASURED, STARTUP, TIMES, Number
from pipeline.report.numbers.peaks import peaks_of
from pipeline.report.numbers.row import Row


def tflops(row: Row) -> float | None:
    """Return the TFLOP/s of all devices at the row's throughput; None if the operations weren't counted."""
    if not row.flops:
        return None
    return sum(row.flops.of_sample.values()) * row.samples_per_second.median / 1e12


def mfu(row: Row) -> float | None:
    """Return the model FLOPs utilization: the time that the operations take at the devices' peak, as a share.

    Where all operations have the same arithmetic, it is their TFLOP/s over the peak. None where a peak isn't known.
    """
    if not row.flops or not row.gpus or without_peak(row):
        return None
    peaks = [peaks_of(gpu) for gpu in row.gpus]
    tera = row.samples_per_second.median / 1e12
    return sum(tera * flops / sum(peak[name] for peak in peaks) for name, flops in row.flops.of_sample.items())


def without_peak(row: Row) -> list[str]:
    """Return the GPUs of a row, with an arithmetic each, whose peak isn't known."""
    used = row.flops.of_sample if row.flops else {}
    return [f"{gpu} in {name}" for gpu in dict.fromkeys(row.gpus) for name in used if name not in peaks_of(gpu)]


_SHARED: tuple[Number, ...] = (
    Number(name="speedup", metric="speedup", of=lambda row: row.speedup, of_baseline=1.0),
    Number(name="efficiency", metric="efficiency", of=lambda row: row.efficiency, of_baseline=1.0),
    Number(name="cost", metric="cost", of=lambda row: row.cost),
)
PREDICTED: tuple[Number, ...] = (*TIMES, *_SHARED)
"""Numbers that are predicted as well."""
COMPARED: tuple[Number, ...] = (
    *_SHARED,
    Number(name="speedup_ci_low", metric="speedup_ci_low", of=lambda row: row.speedup_ci_low, of_baseline=1.0),
    Number(name="speedup_ci_high", metric="speedup_ci_high", of=lambda row: row.speedup_ci_high, of_baseline=1.0),
    Number(
        name="speedup_rounds",
        metric="speedup_rounds",
        of=lambda row: None if row.speedup is None else row.speedup_rounds,
    ),
    Number(
        name="largest_loss_difference",
        metric="largest_loss_difference",
        of=lambda row: row.largest_loss_difference,
        of_baseline=0.0,
    ),
    Number(name="tflops", metric="tflops", of=tflops),
    Number(name="mfu", metric="mfu", of=mfu),
    Number(name="energy_kwh", metric="energy_kwh", of=lambda row: row.energy.kwh if row.energy else None),
    Number(
        name="energy_j_per_sample",
        metric="energy_j_per_sample",
        of=lambda row: row.energy.joules_per_sample if row.energy else None,
    ),
    Number(name="unexplained_ms", of=lambda row: row.unexplained_ms),
)
"""Numbers that are known once all trials have ended."""
NUMBERS: tuple[Number, ...] = (*MEASURED, STARTUP, *COMPARED)


def metrics_of(row: Row, numbers: Iterable[Number] = NUMBERS) -> dict[str, float | None]:
    """Return a row's numbers by the names of their metrics, None where unknown."""
    return {number.metric: number.value(row) for number in numbers if number.metric}
