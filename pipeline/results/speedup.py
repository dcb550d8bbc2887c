"""The rows of a result: what each trial measured, and its speedup over the baseline.

Speedup is throughput over the baseline's throughput; efficiency is speedup over the ratio of devices, which are cores
on CPU. A worker has a fixed number of cores, so N workers have N times the cores of one worker; the reference is a
single process with all these cores.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from pipeline.protocol import estimates
from pipeline.protocol.estimates import Estimate
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import CellMeasurement, Role, Trial
from pipeline.protocol.trial_result import Spread, StepParts, TrialResult
from pipeline.results.losses import LossCheck, check_losses
from pipeline.results.record import FAR, WIDE, Fact, State
from pipeline.wording import counted

Claim = Literal["none", "invalid", "inconclusive", "faster", "slower"]
"""Claim of a row's speedup; "invalid": its loss differs from the baseline's, and nothing explains that."""
_ROLES: tuple[Role, ...] = ("baseline", "reference", "cell", "main")
_PEAKS: Mapping[str, Mapping[str, float]] = {
    r"NVIDIA (H100 80GB HBM3|H200)": {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"NVIDIA H100 PCIe": {"bf16": 756},
    r"(NVIDIA )?A100(-(SXM4|PCIE)-(40|80)GB| 80GB PCIe)": {
        "fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312,
    },
    r"NVIDIA L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    r"NVIDIA L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    r"Tesla V100-SXM2-(16|32)GB": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
    r"Tesla T4": {"fp32": 8.1, "fp16": 65},
}  # fmt: skip
"""Peak throughput of GPUs by their whole name in CUDA and by arithmetic, in TFLOP/s, without structured sparsity.

The figures are the vendor's, each as two of the pages below quote them from its data sheets. Sheets give some figures
only with sparsity; these are half of them. fp64 and tf32 are those of tensor cores, fp32 is that of the other cores.
Types and GPUs for which there is one page only, or pages that differ, are left out; a part of a GPU (MIG) has another
name.

- V100, T4, A100, H100, L4: Lightning, src/lightning/fabric/utilities/throughput.py
- A100, L4: PyTorch, torch/_inductor/analysis/device_info.py
- A100, H100 PCIe, H200: torchtitan, torchtitan/tools/utils.py
- A100: https://glennklockwood.com/garden/processors/A100
- H100 SXM, and H200, which computes like it: https://glennklockwood.com/garden/processors/h100
- H100 SXM, L40S: https://hmc-tech.com/gpu/nvidia-gb200-vs-nvidia-h100-sxm, .../nvidia-l40s-vs-nvidia-t40
- L40S: https://www.mullet.se/product.html?product_id=355414, LLMRoofline, hardware_dict.py
- V100: https://grokipedia.opelly.me/articles/nvidia-tesla-v100
- T4: https://geektopia.es/es/technology/2018/09/13/noticias/
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trial with what it measured, in one or several repeats."""

    trial: Trial
    result: TrialResult  # Result of the trial; of several repeats, their medians, with each repeat as a slot
    start_s: float | None = None
    """Seconds from the launch to the end of the first step; None if it ran beside the training that was launched."""
    baseline: "Row | None" = None
    """The row that the speedup is relative to; None for the baseline itself, and without one."""

    @property
    def key(self) -> str:
        """Name of the trial, e.g. "main"."""
        return self.trial.name

    @property
    def role(self) -> Role:
        """Role of the trial."""
        return self.trial.role

    @property
    def has_all_cores(self) -> bool:
        """True for one process with all the cores that the main trial divides among several."""
        return self.role == "reference" and self.trial.device == "cpu" and self.trial.workers == 1

    @property
    def cores(self) -> int:
        """Cores of all workers."""
        return self.trial.workers * self.trial.cpus_per_worker

    @property
    def device_count(self) -> int:
        """Number of devices that compute: cores on a CPU, else GPUs."""
        return self.cores if self.trial.device == "cpu" else self.trial.replicas

    @property
    def devices(self) -> str:
        """Devices that compute, e.g. "2 cores" or "4 GPUs"."""
        return counted(self.device_count, "core" if self.trial.device == "cpu" else "GPU")

    @property
    def short_name(self) -> str:
        """Name without the strategy, e.g. "2 workers" or "1 process on both cores"."""
        return name_configuration(self._size, "single", self._variant)

    @property
    def _size(self) -> str:
        if self.has_all_cores:
            return f"1 process on {self._all_cores}"
        if self.trial.workers == 1 and self.trial.replicas > 1:  # DataParallel
            return f"1 process on {self.devices}"
        return counted(self.trial.workers, "worker")

    @property
    def _variant(self) -> str:
        return self.trial.variant if isinstance(self.trial, CellMeasurement) else ""

    @property
    def name(self) -> str:
        """Name with what distinguishes the row, e.g. "1 worker", "2 workers (ddp)" or "1 process, both cores"."""
        if self.has_all_cores:
            return f"1 process, {self._all_cores}"
        micro = "" if self.result.micro_batches is None else f"{self.result.micro_batches} micro-batches"
        return name_configuration(self._size, self.trial.strategy, self._variant, micro)

    @property
    def label(self) -> str:
        """Name for a table, where the baseline is marked."""
        if self.role != "baseline":
            return self.name
        return f"{self.name.removesuffix(')')}, baseline)" if self.name.endswith(")") else f"{self.name} (baseline)"

    @property
    def _all_cores(self) -> str:
        return "1 core" if self.cores == 1 else "both cores" if self.cores == 2 else f"all {self.cores} cores"

    @property
    def batch(self) -> int:
        """Global batch size."""
        return self.trial.experiment.train.global_batch_size

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.result.samples_per_second.median

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        return self.result.step_ms.median

    @property
    def intervals(self) -> tuple[float, ...]:
        """Throughput in each slot, or the median of each repeat, in order."""
        return self.result.slots or (self.rate,)

    @property
    def confidence(self) -> float:
        """Confidence level of intervals."""
        return self.trial.experiment.benchmark.confidence_level

    @property
    def is_one_replica_dp(self) -> bool:
        """True if this is DataParallel on fewer than two devices."""
        return self.trial.strategy == "dp" and self.trial.replicas < 2

    @property
    def ratio(self) -> Estimate | None:
        """Speedup with its interval; None if no speedup can be claimed."""
        if self.baseline is None or self.is_one_replica_dp:
            return None
        base, own = self.baseline.trial, self.trial
        if self.role == "main" and (own.strategy, own.replicas) == (base.strategy, base.replicas):
            return None  # it is the baseline once more, so that their ratio would only show noise
        return self.compare(self.baseline)

    @property
    def efficiency(self) -> Estimate | None:
        """Scaling efficiency with its interval: speedup over the ratio of devices, 1 is linear."""
        if self.baseline is None or (ratio := self.ratio) is None:
            return None
        factor = self.baseline.device_count / self.device_count
        return Estimate(factor * ratio.value, factor * ratio.low, factor * ratio.high, ratio.size)

    @property
    def loss_check(self) -> LossCheck | None:
        """Comparison with the baseline's losses; None if they can't be compared."""
        base = self.baseline
        return None if base is None else check_losses(self.trial, self.result, base.trial, base.result)

    @property
    def claim(self) -> Claim:
        """Claim that the speedup allows."""
        if (ratio := self.ratio) is None:
            return "none"
        if (check := self.loss_check) is not None and check.state == "differs":
            return "invalid"
        return "inconclusive" if not ratio.is_clear else "faster" if ratio.value > 1 else "slower"

    @property
    def state(self) -> State:
        """State of the facts about the speedup."""
        return "invalid" if self.claim == "invalid" else "inconclusive" if self.claim == "inconclusive" else "ok"

    def compare(self, other: "Row") -> Estimate:
        """Return the ratio of throughputs with its interval, from slots or repeats that were measured in turn.

        Without those it is the ratio of the medians of windows, with the range of the ratios of all windows and a size
        of 0: on a machine whose speed drifts that is no interval. After an interrupted benchmark one row may have more
        repeats; these are ignored.
        """
        pairs = list(zip(self.intervals, other.intervals, strict=False))
        if len(pairs) > 1:
            return estimates.ratio(pairs, confidence=self.confidence)
        own, base = self.result.samples_per_second, other.result.samples_per_second
        return Estimate(own.median / base.median, own.low / base.high, own.high / base.low, 0)

    def is_faster_than(self, other: "Row", *, factor: float = 1.0) -> bool:
        """Return True if the row is faster than another one beyond the noise, by more than a factor."""
        ratio = self.compare(other)
        return ratio.is_clear and ratio.value > factor

    def training_s(self, *, start_s: float = 0.0) -> float | None:
        """Return the seconds of the whole training at this throughput, with its start or else ``start_s``."""
        if not self.result.whole_training:
            return None
        return self.result.whole_training / self.rate + (start_s if self.start_s is None else self.start_s)


def name_configuration(short: str, strategy: str, *details: str) -> str:
    """Name a configuration with what distinguishes it, e.g. "2 workers (ddp, batch 64)"."""
    listed = ", ".join(filter(None, ["" if strategy == "single" else strategy, *details]))
    return f"{short} ({listed})" if listed else short


def is_wide(ratio: Estimate) -> bool:
    """Return True if the interval is so wide that the value says little."""
    return ratio.high > WIDE * ratio.low


def is_unmeasurable(ratio: Estimate) -> bool:
    """Return True if the interval says nothing at all."""
    return ratio.size > 0 and ratio.low < 1 / FAR and ratio.high > FAR


def measure_rows(trials: Sequence[Trial], finished: Iterable[Finished], *, order: Sequence[str] = ()) -> list[Row]:
    """Return a row for each trial that has finished, compared with the baseline: that first, the training last."""
    ends: dict[str, list[Finished]] = {}
    for end in finished:
        ends.setdefault(end.result.trial, []).append(end)
    rows = []
    for trial in trials:
        if trial.repeat or trial.name not in ends:
            continue
        starts = [end.time_to_first_step_s for end in ends[trial.name] if end.time_to_first_step_s is not None]
        merged = merge_repeats([end.result for end in ends[trial.name]])
        rows.append(Row(trial=trial, result=merged, start_s=median(starts) if starts else None))
    flops = next((row.result.flops for row in rows if row.result.flops), None)  # one trial counts for all
    rows = [replace(row, result=row.result.model_copy(update={"flops": row.result.flops or flops})) for row in rows]

    def place(row: Row) -> tuple[int, int]:
        listed = order.index(row.key) if row.key in order else len(order)
        return _ROLES.index(row.role), row.trial.replicas if row.role == "reference" else listed

    rows.sort(key=place)  # stable
    if not rows or rows[0].role != "baseline":
        return rows
    return [rows[0], *(replace(row, baseline=rows[0]) for row in rows[1:])]


def find_main(rows: Sequence[Row]) -> Row:
    """Return the row that the result is about.

    For a run this is the training; for a benchmark the configuration with most workers, the fastest of several, or
    else the baseline. The baseline's global batch goes before others, with which another training is measured.
    """

    def merit(row: Row) -> tuple[bool, bool, int, float]:
        return row.ratio is not None, row.batch == rows[0].batch, row.trial.replicas, row.rate

    if rows[-1].role == "main":
        return rows[-1]
    return max((row for row in rows if row.role == "cell"), key=merit, default=rows[0])


def merge_repeats(results: Sequence[TrialResult]) -> TrialResult:
    """Return the first result with the times, memory and utilization of all repeats; each repeat is a slot."""
    first, parts = results[0], [result.parts for result in results]
    if len(results) == 1:
        return first
    repeats = first.slots or tuple(result.samples_per_second.median for result in results)
    held = [part.held_ms for part in parts if part.held_ms is not None]
    merged = StepParts(
        held_ms=_over(held) if held else None,
        compute_ms=_median([part.compute_ms for part in parts]),
        exposed_communication_ms=_median([part.exposed_communication_ms for part in parts]),
        data_wait_ms=median(part.data_wait_ms for part in parts),
        rest_ms=_median([part.rest_ms for part in parts]),
        ranges={
            key: (min(known), max(known))
            for key in parts[0].ranges
            if (known := [value for part in parts if (value := getattr(part, key)) is not None])
        },
        ranks=tuple(map(_over, zip(*(part.ranks for part in parts if part.ranks), strict=True))),
        nodes=parts[0].nodes,
    )
    update = {
        "samples_per_second": estimates.geometric_spread(repeats),
        "slots": repeats,
        "step_ms": _over([result.step_ms for result in results]),
        "parts": merged,
        "peak_memory_mb": tuple(map(max, zip(*(result.peak_memory_mb for result in results), strict=True))),
        "gpu_utilization": tuple(map(median, zip(*(result.gpu_utilization for result in results), strict=True))),
        "costs": None,
    }
    return first.model_copy(update=update)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _over(spreads: Sequence[Spread]) -> Spread:
    return estimates.spread([one.median for one in spreads], keeps_values=True)


def iter_facts(row: Row, *, start_s: float = 0.0, training_s: float | None = None) -> Iterator[Fact]:
    """Yield the numbers of a row, each defined here alone; one that is not known has no value."""
    result, parts, ratio, efficiency, check = row.result, row.result.parts, row.ratio, row.efficiency, row.loss_check

    def fact(key: str, value: float | None, label: str, unit: str = "", ends: Estimate | None = None) -> Fact:
        has_ends = ends is not None and ends.size > 0
        low, high = (ends.low, ends.high) if ends is not None and has_ends else (None, None)
        own = row.state if key in ("speedup", "efficiency") else "ok"
        made = {"key": key, "value": value, "low": low, "high": high, "unit": unit, "label": label, "state": own}
        return Fact.model_validate({**made, "trial": row.key})

    seconds = row.training_s(start_s=start_s) if training_s is None else training_s
    price = row.trial.experiment.benchmark.price_per_device_hour
    device_s = None if seconds is None else seconds * row.device_count
    yield fact("samples_per_second", row.rate, "throughput", "samples/s")
    yield fact("speedup", ratio and ratio.value, "speedup", "x", ratio)
    yield fact("efficiency", efficiency and efficiency.value, "scaling efficiency", "%", efficiency)
    yield fact("speedup_rounds", ratio and ratio.size, "rounds of the measurement")
    yield fact("largest_loss_difference", check and check.largest, "largest difference from the baseline's loss")
    yield fact("step_ms", row.step_ms, "step time, ms", "ms")
    yield fact("compute_ms", parts.compute_ms, "compute, ms per step", "ms")
    exposed, sync, energy = parts.exposed_communication_ms, result.communication, result.energy
    yield fact("exposed_communication_ms", exposed, "exposed (not overlapped) communication, ms per step", "ms")
    yield fact(
        "communication_ms", sync.ms if sync else None, "gradient synchronization, overlapped or not, ms per step", "ms"
    )
    yield fact(
        "communication_share", sync.share if sync else None, "gradient synchronization, share of the training", "%"
    )
    yield fact("data_wait_ms", parts.data_wait_ms, "data loading, ms per step", "ms")
    yield fact("rest_ms", parts.rest_ms, "optimizer and other, ms per step", "ms")
    yield fact("time_to_first_step_s", row.start_s, "startup", "s")
    yield fact("compile_s", result.compile_s, "compile time", "s")
    yield fact("estimated_training_s", seconds, "estimated time of the training", "s")
    yield fact("estimated_device_hours", device_s and device_s / 3600, "estimated device hours of the training")
    cost = None if device_s is None or price is None else price * device_s / 3600
    yield fact("cost", cost, "estimated price of the training")
    held = max(result.held.mb) if result.held else None
    yield fact("peak_memory_mb", max(result.peak_memory_mb, default=None), "peak memory per device", "MiB")
    yield fact("held_mb", held, "weights, gradients and optimizer per device", "MiB")
    yield fact("gpu_utilization", min(result.gpu_utilization, default=None), "lowest GPU utilization, %")
    yield fact("tflops", tflops(row), "TFLOP/s of all devices")
    yield fact("mfu", mfu(row), "model FLOPs utilization (MFU)", "%")
    yield fact("energy_kwh", energy.kwh if energy else None, "energy, kWh")
    yield fact("energy_j_per_sample", energy.joules_per_sample if energy else None, "energy per sample, J")


def facts_of(row: Row, *, start_s: float = 0.0, training_s: float | None = None) -> dict[str, Fact]:
    """Return the numbers of a row by their keys, see `iter_facts`."""
    return {fact.key: fact for fact in iter_facts(row, start_s=start_s, training_s=training_s)}


def tflops(row: Row) -> float | None:
    """Return the TFLOP/s of all devices at the row's throughput; None if the operations weren't counted."""
    return sum(row.result.flops.of_sample.values()) * row.rate / 1e12 if row.result.flops else None


def mfu(row: Row) -> float | None:
    """Return the time that the operations take at the devices' peak, as a share; None where a peak isn't known.

    Where all operations have the same arithmetic, it is their TFLOP/s over the peak.
    """
    flops, gpus = row.result.flops, row.result.gpus
    peaks = [next((peak for name, peak in _PEAKS.items() if re.fullmatch(name, gpu)), {}) for gpu in gpus]
    if not flops or not gpus or any(name not in peak for peak in peaks for name in flops.of_sample):
        return None
    return sum(row.rate / 1e12 * ops / sum(peak[name] for peak in peaks) for name, ops in flops.of_sample.items())
