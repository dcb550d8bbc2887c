"""What `pipeline tune-batch` says: the batch sizes that were tried, and what to write in the file."""

from pipeline.config.values import Frozen
from pipeline.protocol.trial import BatchCandidate, BatchSizes, Trial
from pipeline.report.batch_advice import BatchAdvice
from pipeline.report.tables import ReportTable, amount

FILE_NAME = "tuning.json"
"""Name of a `TunedReport` in a run's folder."""

_HEADER = ("batch of a device", "global batch", "samples/s", "peak MB per rank", "remarks")


class Tuned(Frozen):
    """What ``pipeline tune-batch --json`` prints. Batch sizes are samples of one device's micro-batch."""

    candidates: tuple[BatchCandidate, ...]
    largest_that_fits: int | None
    """None if memory never ran out."""
    recommended: int
    """The smallest whose throughput is close to the best."""
    workers: int
    global_batch_size: int
    """The file's."""
    change: tuple[str, ...]
    """Keys of the file with the values that lead to the recommended size; empty if it has them."""


class TunedReport(Frozen):
    """The same for people."""

    tuned: Tuned
    name: str
    """Name of the experiment."""
    title: str
    """The trial's, e.g. "ddp x 2"."""
    hardware: str
    replicas: int
    """Copies of the model that compute side by side."""
    declared: int
    """The file's batch of a device."""
    reason: str
    """Why to change what should be changed."""

    @classmethod
    def of(cls, trial: Trial, sizes: BatchSizes, advice: BatchAdvice, *, hardware: str) -> "TunedReport":
        """The report of a trial in which at least one size fit."""
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
        return f"{self.name}: batch size of a device, {self.title}", self.hardware

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """What was tried."""
        sizes = [one.batch_size for one in self.tuned.candidates]
        rows = tuple(map(self._cells, self.tuned.candidates))
        return (ReportTable(header=_HEADER, rows=rows, emphasis=sizes.index(self.tuned.recommended)),)

    @property
    def closing(self) -> tuple[str, ...]:
        """Lines below the table, the result first."""
        smallest = f"Recommended: {self.tuned.recommended:,} samples, the smallest within 5 % of the best throughput."
        if self.tuned.largest_that_fits is not None:
            largest = f"Largest that fits: {self.tuned.largest_that_fits:,} samples."
        else:
            largest = f"At least {self.tuned.candidates[-1].batch_size:,} samples fit: memory never ran out."
        return smallest, largest, self.reason

    @property
    def advised(self) -> tuple[str, ...]:
        """What to write in the file."""
        return self.tuned.change

    def _cells(self, one: BatchCandidate) -> tuple[str, ...]:
        rate = one.samples_per_second
        remarks = [
            *(["recommended"] if one.batch_size == self.tuned.recommended else []),
            *(["the file's"] if one.batch_size == self.declared else []),
        ]
        return (
            f"{one.batch_size:,}",
            f"{one.batch_size * self.replicas:,}",
            f"{amount(rate.median)} ±{(rate.high - rate.low) / 2 / rate.median:.0%}" if rate else "doesn't fit",
            f"{max(one.peak_memory_mb):,.0f}" if one.peak_memory_mb else "",
            ", ".join(remarks),
        )
