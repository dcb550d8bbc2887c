"""Definitions of speedup and scaling efficiency, for the rows that every form of a report shows.

Speedup is throughput over the baseline's throughput; efficiency is speedup over the ratio of devices, which are cores
on CPU. A worker has a fixed number of cores, so N workers have N times the cores of one worker; the reference measures
a single process with all these cores.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pipeline.experiment.values import Recorded
from pipeline.protocol import estimates
from pipeline.protocol.estimates import CONFIDENCE, Estimate
from pipeline.protocol.labels import Role
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.record.runs import estimate_of
from pipeline.report.numbers.repeats import merge_repeats
from pipeline.wording import counted

if TYPE_CHECKING:
    from pipeline.protocol.events import Finished

LOSS_TOLERANCE: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
"""Largest difference of two loss series of the same training, by precision: sums in another order round differently.

TF32 rounds factors to 10 bits, and batches of other sizes take other kernels. Relative to the loss where the loss is
larger than 1.
"""
ACCURACY = 0.1
"""Best accuracy at which the parts of a step can be measured, relative to the step."""
FIRST_STEPS = 3
"""Steps whose losses decide if two trainings are the same.

Training amplifies rounding, by a factor of 100 per step with batch norm and a high learning rate, so equal trainings
may drift apart later. The loss of the first step depends on the forward pass, the following losses on gradients and
optimizer.
"""


class Row(TrialResult):
    """Measurements of one trial, from one or several repeats, relative to the baseline.

    Its own measurements are merged by `pipeline.report.numbers.repeats.merge_repeats`.
    """

    title: str
    """Title of the trial, e.g. "ddp, 2 workers"."""
    role: Role
    strategy: str
    options: Mapping[str, Any] = {}
    """Options of the strategy."""
    workers: int
    """Processes (world size)."""
    replicas: int
    """Copies of the model that compute in parallel."""
    device: Literal["cpu", "cuda"]
    cpus: int
    """Total cores of all workers."""
    global_batch_size: int
    speedup: float | None = None
    """Throughput over the baseline's throughput; None if no speedup can be claimed."""
    speedup_ci_low: float | None = None
    """Lower end of the speedup's interval."""
    speedup_ci_high: float | None = None
    """Upper end of the interval."""
    speedup_rounds: int = 0
    """Rounds of slots or repeats behind the interval; 0 if it is only the range of the ratios of windows."""
    confidence: float = CONFIDENCE
    """Confidence level of the interval."""
    efficiency: float | None = None
    """Speedup over the ratio of devices, 1 is linear; None if no speedup can be claimed."""
    cost: float | None = None
    """Price of the whole training on these devices; None without ``benchmark.price_per_device_hour``."""
    time_to_first_step_s: float | None = None
    """Seconds from the launch to the end of the first step; None if it ran beside the training that was launched."""
    largest_loss_difference: float | None = None
    """Largest difference from the baseline's loss in the same step, relative to it where it is above 1.

    None if the global batch size differs from the baseline's.
    """
    first_loss_difference: float | None = None
    """Largest difference within the first `FIRST_STEPS` steps."""
    loss_tolerance: float
    """Difference that rounding can explain."""

    @classmethod
    def of(cls, trial: Trial, ends: "Sequence[Finished]") -> "Row":
        """Build the row of a trial from its finished repeats, not yet compared with a baseline."""
        result = merge_repeats([end.result for end in ends])
        waits = [end.time_to_first_step_s for end in ends if end.time_to_first_step_s is not None]
        parts = result.micro_batches
        return cls(
            **dict(result),
            title=trial.title if parts is None else f"{trial.title} ({parts} micro-batches)",
            replicas=trial.replicas,
            cpus=trial.workers * trial.cpus_per_worker,
            global_batch_size=trial.experiment.train.global_batch_size,
            confidence=trial.experiment.benchmark.confidence_level,
            time_to_first_step_s=median(waits) if waits else None,
            loss_tolerance=LOSS_TOLERANCE[_precision(trial, result)],
            **trial.model_dump(include={"role", "strategy", "options", "workers", "device"}),
        )

    @property
    def repeats(self) -> tuple[float, ...]:
        """Throughput in each slot, or the median of each repeat, in order."""
        return self.slots or (self.samples_per_second.median,)

    def against(self, baseline: "Row") -> "Row":
        """Return the row with its speedup over the baseline, if it can be claimed, and its loss differences."""
        differences = self._loss_differences(baseline)
        figures = {
            "largest_loss_difference": max(differences, default=None),
            "first_loss_difference": max(differences[:FIRST_STEPS], default=None),
        }
        if not (self.is_one_replica_dp or self.measures_again(baseline)):
            ratios = self.throughput_over(baseline)
            figures |= {"speedup": ratios.value, "speedup_ci_low": ratios.low, "speedup_ci_high": ratios.high}
            figures["speedup_rounds"] = ratios.size
            figures["efficiency"] = ratios.value / (self.device_count / baseline.device_count)
        return self.model_copy(update=figures)

    @property
    def is_one_replica_dp(self) -> bool:
        """True if this is DataParallel on fewer than two devices."""
        return self.strategy == "dp" and self.replicas < 2

    def measures_again(self, baseline: "Row") -> bool:
        """Return True if the main trial repeats the baseline, so that their ratio would only show noise."""
        return self.role == "main" and (self.strategy, self.replicas) == (baseline.strategy, baseline.replicas)

    @property
    def is_resolved(self) -> bool:
        """True if the interval of the speedup excludes 1, or there is no speedup."""
        return (ratio := self.ratio) is None or ratio.is_clear

    @property
    def same_training(self) -> Literal["yes", "at first", "no"] | None:
        """Agreement with the baseline's losses in all steps ("yes") or only in the first steps ("at first").

        None if the global batch size differs from the baseline's.
        """
        if self.largest_loss_difference is None or self.first_loss_difference is None:
            return None
        if self.largest_loss_difference <= self.loss_tolerance:
            return "yes"
        return "at first" if self.first_loss_difference <= self.loss_tolerance else "no"

    @property
    def devices(self) -> str:
        """Devices that compute, e.g. "2 cores" or "4 GPUs"."""
        return counted(self.device_count, "core" if self.device == "cpu" else "GPU")

    @property
    def device_count(self) -> int:
        """Number of devices that compute."""
        return self.cpus if self.device == "cpu" else self.replicas

    @property
    def share_of_communication(self) -> float:
        """Exposed communication as a fraction of the step."""
        return (self.parts.exposed_communication_ms or 0.0) / self.step_ms.median

    @property
    def share_of_data_wait(self) -> float:
        """Data wait as a fraction of the step."""
        return self.parts.data_wait_ms / self.step_ms.median

    @property
    def noise_ms(self) -> float:
        """Milliseconds by which noise alone can separate the step from the sum of its parts."""
        held = self.parts.held_ms
        return estimates.half_range(self.step_ms) + (estimates.half_range(held) if held is not None else 0.0)

    @property
    def unexplained_ms(self) -> float:
        """Milliseconds of the step that its parts don't explain; negative if they explain too much, 0 within noise."""
        if (total := self.parts.sum_ms) is None or self.step_ms.windows < 2:
            return 0.0
        missed = self.step_ms.median - total
        return missed if abs(missed) > max(self.noise_ms, ACCURACY * self.step_ms.median) else 0.0

    @property
    def ratio(self) -> Estimate | None:
        """Speedup with its interval; None if no speedup can be claimed."""
        return estimate_of(self.speedup, self.speedup_ci_low, self.speedup_ci_high, self.speedup_rounds)

    @property
    def efficiencies(self) -> Estimate | None:
        """Efficiency with its interval; None if there is no efficiency."""
        if (ratio := self.ratio) is None or not self.efficiency:
            return None
        factor = self.efficiency / ratio.value
        return Estimate(self.efficiency, factor * ratio.low, factor * ratio.high, ratio.size)

    def throughput_over(self, other: "Row") -> Estimate:
        """Return the ratio of throughputs with its interval, from slots or repeats that were measured in turn.

        Without those it is the ratio of the medians of windows, with the range of the ratios of all windows and a size
        of 0: on a machine whose speed drifts that is no interval. After an interrupted comparison one row may have more
        repeats; these are ignored.
        """
        pairs = list(zip(self.repeats, other.repeats, strict=False))
        if len(pairs) > 1:
            return estimates.ratio(pairs, confidence=self.confidence)
        own, base = self.samples_per_second, other.samples_per_second
        return Estimate(own.median / base.median, own.low / base.high, own.high / base.low, 0)

    def is_faster_than(self, other: "Row", *, factor: float = 1.0) -> bool:
        """Return True if the row is faster than another one beyond the noise, by more than a factor."""
        ratio = self.throughput_over(other)
        return ratio.is_clear and ratio.value > factor

    def _loss_differences(self, baseline: "Row") -> list[float]:
        """Return the differences by step; empty if the global batch sizes differ."""
        if self.global_batch_size != baseline.global_batch_size:
            return []
        pairs = zip(self.losses, baseline.losses, strict=False)  # training that ended early has fewer
        differences = [abs(own - base) / max(1.0, abs(base)) for own, base in pairs]
        return [math.inf if math.isnan(difference) else difference for difference in differences]


class Unmeasured(Recorded):
    """A cell of a comparison that was not measured."""

    trial: str
    title: str
    strategy: str
    workers: int
    reason: str
    """Explanation, e.g. that the cell needs more cores than there are."""


class Advice(Recorded):
    """One suggested change."""

    reason: str
    """Sentence about the measurement behind the advice."""
    change: str
    """Action to take; ends with ``overrides`` if there are any, e.g. "set loader.num_workers=2"."""
    key: str = ""
    """Key of the experiment file to change; empty if the machine is to be changed."""
    overrides: str = ""
    """Overrides that make the change, to be pasted behind ``pipeline run FILE``; empty without a key."""
    measured: bool = True
    """True if this run measured the change; otherwise it is a suggestion to try."""
    use: str = ""
    """Name of the row that the change switches to, e.g. "1 worker". Empty if it is not a row of the report."""
    why: str = ""
    """Reason for a screen that has shown the speedup already; may be empty."""


def find_main_row(rows: Sequence[Row]) -> Row:
    """Return the row that the result is about.

    For a run this is the training; for a comparison the configuration with most workers, the fastest of several, or
    else the baseline. The baseline's global batch goes before others, with which another training is measured.
    """
    if rows[-1].role == "main":
        return rows[-1]
    cells = [row for row in rows if row.role == "cell"]
    return max(cells, key=lambda row: _merit(row, batch=rows[0].global_batch_size), default=rows[0])


def _merit(row: Row, *, batch: int) -> tuple[bool, bool, int, float]:
    return row.ratio is not None, row.global_batch_size == batch, row.replicas, row.speedup or 0.0


def _precision(trial: Trial, result: TrialResult) -> str:
    """Return the lowest precision in which a trial computed, as its counted operations show."""
    declared = trial.experiment.train.precision
    return "tf32" if declared == "fp32" and result.flops and "tf32" in result.flops.of_sample else declared
