"""The report of `pipeline tune-batch`: the batch sizes tried, and what to write in the experiment file.

The global batch decides what is trained: it is kept if gradient accumulation alone leads to the recommended size, and
never changed without a remark.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.config.dialect import written
from pipeline.config.train import Train
from pipeline.config.values import Recorded
from pipeline.protocol import estimates
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import BatchCandidate, BatchSizes
from pipeline.report import is_clear
from pipeline.report.tables import ReportTable, amount
from pipeline.wording import counted

FILE_NAME = "tuning.json"
"""File name of a `TunedReport` in a run's folder."""

_HEADER = ("batch per device", "global batch", "samples/s", "peak MiB per rank", "remarks")


class BatchAdvice(NamedTuple):
    """Change of the experiment file with its reason."""

    change: tuple[str, ...]
    reason: str


class Tuned(Recorded):
    """Output of ``pipeline tune-batch --json``. Batch sizes are samples per device and micro-batch."""

    candidates: tuple[BatchCandidate, ...]
    largest_that_fits: int | None
    """Largest size that fits in memory; None if memory never ran out."""
    recommended: int
    """Smallest size whose throughput is close to the best."""
    workers: int
    global_batch_size: int
    """Global batch size of the file."""
    change: tuple[str, ...]
    """Lines for the file that lead to the recommended size; empty if the file has that size."""


class TunedReport(Recorded):
    """The report of `pipeline tune-batch` for people."""

    tuned: Tuned
    name: str
    """Name of the experiment."""
    title: str
    """Title of the trial, e.g. "ddp, 2 workers"."""
    hardware: str
    replicas: int
    """Copies of the model that compute in parallel."""
    declared: int
    """Batch size per device in the file."""
    reason: str
    """Reason for the change, or for changing nothing."""

    @classmethod
    def of(cls, trial: Trial, sizes: BatchSizes, advice: BatchAdvice, *, hardware: str) -> "TunedReport":
        """Build the report of a trial in which at least one size fit."""
        assert sizes.recommended is not None
        tuned = Tuned(
            candidates=sizes.candidates,
            largest_that_fits=sizes.largest_that_fits,
            recommended=sizes.recommended,
            workers=trial.workers,
            global_batch_size=trial.experiment.train.global_batch_size,
            change=advice.change,
        )
        return cls(
            tuned=tuned,
            name=trial.experiment.name,
            title=trial.title,
            hardware=hardware,
            replicas=trial.replicas,
            declared=trial.device_batch_size,
            reason=advice.reason,
        )

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the table, the title first."""
        return f"{self.name}: batch size per device, {self.title}", self.hardware

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """Table of the sizes tried."""
        sizes = [one.batch_size for one in self.tuned.candidates]
        rows = tuple(map(self._cells, self.tuned.candidates))
        return (ReportTable(header=_HEADER, rows=rows, emphasis=sizes.index(self.tuned.recommended)),)

    @property
    def verdict(self) -> str:
        """Recommended size in one line."""
        size = counted(self.tuned.recommended, "sample", spec=",")
        return f"{self.title}: {size} per device, the smallest batch within 5% of the best throughput"

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the table: the largest size, the reason for the change, and lines for the experiment file."""
        if self.tuned.largest_that_fits is not None:
            largest = f"Largest that fits: {counted(self.tuned.largest_that_fits, 'sample', spec=',')}."
        else:
            tried = counted(self.tuned.candidates[-1].batch_size, "sample", spec=",")
            largest = f"Largest that fits: at least {tried}; memory never ran out."
        advice = [("Advice", *self.tuned.change)] if self.tuned.change else []
        return (largest, self.reason), *advice

    def _cells(self, one: BatchCandidate) -> tuple[str, ...]:
        rate = one.samples_per_second
        remarks = [
            *(["recommended"] if one.batch_size == self.tuned.recommended else []),
            *(["the file's"] if one.batch_size == self.declared else []),
        ]
        return (
            f"{one.batch_size:,}",
            f"{one.batch_size * self.replicas:,}",
            amount(rate.median) if rate else "doesn't fit",
            f"{max(one.peak_memory_mb):,.0f}" if one.peak_memory_mb else "",
            ", ".join(remarks),
        )


def advise_batch(trial: Trial, sizes: BatchSizes, *, recommended: int) -> BatchAdvice:
    """Return the change that makes a device's batch the recommended one.

    The global batch is kept if accumulation alone leads there; a larger global batch comes with a scaled learning rate.
    """
    train, replicas, declared = trial.experiment.train, trial.replicas, trial.device_batch_size
    if declared == recommended:
        return BatchAdvice((), f"Nothing to change: the file's {_division(trial)} is the recommended size.")
    grew = sizes.largest_that_fits is None and sizes.candidates[-1].batch_size == recommended
    if grew and declared > recommended:
        return BatchAdvice((), f"The file's {_division(trial)} is larger than all sizes tried: no reason to change it.")
    if declared < recommended and not _is_resolved(sizes, declared, recommended):
        return BatchAdvice(
            (),
            f"Nothing to change: the file's {_division(trial)} is as fast as the recommended size within the noise.",
        )
    wanted = -(-train.global_batch_size // (recommended * replicas))
    accumulation = min(wanted, max(1, train.global_batch_size // trial.workers))
    split = train.model_copy(update={"gradient_accumulation": accumulation})
    after = _with(trial, split).device_batch_size
    change = [] if split == train else [f"train.gradient_accumulation: {accumulation}"]
    if after < recommended and (split == train or accumulation == 1):
        batch = recommended * replicas * accumulation
        keys = trial.experiment.batch_keys(batch)
        change += [*(f"{key}: {written(value)}" for key, value in keys.items()), *_scaled_rate(trial)]
        return BatchAdvice(tuple(change), _larger(trial, sizes, batch=batch))
    return BatchAdvice(tuple(change), _other_split(trial, sizes, after=_with(trial, split)))


def _is_resolved(sizes: BatchSizes, smaller: int, larger: int) -> bool:
    """Return False if both sizes were measured and the larger one is not faster beyond the noise."""
    rates = {one.batch_size: one.samples_per_second for one in sizes.candidates}
    slow, fast = rates.get(smaller), rates.get(larger)
    if slow is None or fast is None:
        return True
    rounds = list(zip(fast.values, slow.values, strict=True))
    return len(rounds) > 1 and is_clear(ratio := estimates.ratio(rounds)) and ratio.value > 1


def _scaled_rate(trial: Trial) -> Iterator[str]:
    train = trial.experiment.train
    if train.lr_scaling.rule == "none":
        yield f"train.lr_scaling: {{rule: linear, base_batch_size: {train.global_batch_size}}}"


def _larger(trial: Trial, sizes: BatchSizes, *, batch: int) -> str:
    train = trial.experiment.train
    steps, before = -(-sizes.train_samples // batch), -(-sizes.train_samples // train.global_batch_size)
    rule = train.lr_scaling.rule
    rate = "so scale the learning rate" if rule == "none" else f"the learning rate follows by train.lr_scaling ({rule})"
    return (
        f"The file's {_division(trial)} is too small{_at(trial, sizes)}. A global batch of {batch:,} (was "
        f"{train.global_batch_size:,}) changes the training: {steps:,} instead of {before:,} optimizer steps in an "
        f"epoch; {rate}, and check that it still trains as well."
    )


def _other_split(trial: Trial, sizes: BatchSizes, *, after: Trial) -> str:
    """Explain a change that keeps the global batch and divides it differently."""
    declared, less = trial.device_batch_size, ""
    if declared < after.device_batch_size:
        fault = f"is too small{_at(trial, sizes)}"
    elif sizes.largest_that_fits is not None and declared > sizes.largest_that_fits:
        fault = "doesn't fit"
    else:
        fault, less = f"is larger than it needs to be{_at(trial, sizes)}", ", and takes less memory"
    kept = f"Accumulation keeps the global batch, and so the training{less}"
    return f"The file's {_division(trial)} {fault}. {kept}: {_division(after)}."


def _division(trial: Trial) -> str:
    """Format the division of a global batch, e.g. "64 = 2 devices x 32"."""
    train = trial.experiment.train
    devices = f"{trial.replicas} devices x " if trial.replicas > 1 else ""
    parts = f"{train.gradient_accumulation} micro-batches x " if train.gradient_accumulation > 1 else ""
    whole = f"{train.global_batch_size:,}"
    return f"{whole} = {devices}{parts}{trial.device_batch_size:,}" if devices or parts else whole


def _at(trial: Trial, sizes: BatchSizes) -> str:
    """Format the throughput of the declared size, if it was measured."""
    rates = {one.batch_size: one.samples_per_second for one in sizes.candidates}
    rate = rates.get(trial.device_batch_size)
    return f" ({amount(rate.median)} samples/s)" if rate else ""


def _with(trial: Trial, train: Train) -> Trial:
    experiment = trial.experiment.model_copy(update={"train": train})
    return trial.model_copy(update={"experiment": experiment})
