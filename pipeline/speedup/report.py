"""The report of a run: its trials side by side, and the remarks without which the figures would mislead."""

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config.schema import Frozen
from pipeline.contract import Role, Spread, Trial
from pipeline.events import Finished
from pipeline.speedup import Advice, Row, Unmeasured

HEADER = ("strategy", "devices", "samples/s", "speedup", "efficiency", "exposed comm. ms", "data wait ms")
"""Names of the columns of `Report.cells`."""

METHOD = (
    "Strong scaling: every trial trains the same global batches. Throughput is that of the steady state, without "
    "warm-up, evaluation and checkpoints: the median of several windows, ± half of their range. Speedup is throughput "
    "over the baseline's; efficiency is speedup over the ratio of replicas. Each worker has a fixed number of cores: "
    "N workers have N times the cores of one. Exposed communication is what a step waits for gradients on top of "
    "computing, data wait what it is longer with the real loader than with a batch held in memory."
)

_ORDER: tuple[Role, ...] = ("baseline", "reference", "cell", "main")


class Report(Frozen):
    """What came out of a run or of a comparison."""

    name: str
    """Name of the experiment."""
    rows: tuple[Row, ...]
    """Baseline first, then references by replicas, then the cells of a comparison, the main training last."""
    unmeasured: tuple[Unmeasured, ...] = ()
    """Cells of a comparison that have no figures."""
    remarks: tuple[str, ...] = ()
    """What a reader must know about the figures."""
    advice: tuple[Advice, ...] = ()
    hardware: str

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        finished: Sequence[Finished],
        *,
        hardware: str,
        unmeasured: Sequence[Unmeasured] = (),
    ) -> "Report":
        """The report of trials, each of which finished once or several times.

        A trial that didn't finish and isn't among the unmeasured is left out, with a remark.

        Raises:
            ValueError: no trial finished, or not the main one of a run, so there is nothing to report.
        """
        ends: dict[str, list[Finished]] = {}
        for end in finished:
            ends.setdefault(end.result.trial, []).append(end)
        once = {trial.name: trial for trial in trials if trial.repeat == 0}
        rows = [Row.of(trial, ends[name]) for name, trial in once.items() if name in ends]
        mains = [trial.name for trial in once.values() if trial.role == "main"]
        if not rows or any(name not in ends for name in mains):
            raise ValueError(f"nothing to report: only {', '.join(ends) or 'no trial'} finished")
        rows.sort(key=lambda row: (_ORDER.index(row.role), row.scaling, row.replicas))
        if rows[0].role == "baseline":
            rows = [rows[0], *(row.against(rows[0]) for row in rows[1:])]
        told = {cell.trial for cell in unmeasured}
        missing = [f"{name} ({trial.title})" for name, trial in once.items() if name not in ends and name not in told]
        remarks = (*(f"{trial} did not finish; it is left out." for trial in missing), *_remarks(rows))
        return cls(
            name=next(iter(once.values())).experiment.name,
            rows=tuple(rows),
            unmeasured=tuple(unmeasured),
            remarks=remarks,
            hardware=hardware,
        )

    @property
    def main(self) -> Row:
        """The training of a run; of a comparison, the fastest cell that has a speedup, or else the last."""
        if self.rows[-1].role == "main":
            return self.rows[-1]
        return max(self.rows, key=lambda row: (row.role == "cell", row.speedup or 0.0))

    @property
    def speedup(self) -> float | None:
        """The main trial's speedup; None where none may be claimed."""
        return self.main.speedup

    @property
    def efficiency(self) -> float | None:
        """The main trial's scaling efficiency, 1 is linear; None where no speedup may be claimed."""
        return self.main.efficiency

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        main = self.main
        rate = f"{main.title} does {amount(main.samples_per_second.median)} samples/s"
        if main.speedup is None:
            return f"{rate}; no speedup is claimed."
        interval = f"{main.speedup_low:.2f}x to {main.speedup_high:.2f}x"
        ratio = f"{main.speedup:.2f}x the throughput of {self.rows[0].title} ({interval})"
        return f"{rate}: {ratio}, scaling efficiency {main.efficiency:.0%}."

    @property
    def outcome(self) -> str:
        """What the main trial reached: validation metrics, time to the first step, peak memory."""
        main = self.main
        parts = [f"{name} {value:.4g}" for name, value in main.metrics.items() if name.startswith("validation/")]
        if main.time_to_first_step_s is not None:
            parts.append(f"first step after {main.time_to_first_step_s:.1f} s")
        if main.peak_memory_mb:
            parts.append(f"peak memory {amount(max(main.peak_memory_mb))} MB")
        return ", ".join(parts)

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the table in the terminal, the title first."""
        return self.name, self.hardware

    @property
    def closing(self) -> tuple[str, ...]:
        """Lines below the table in the terminal, the result first."""
        return (self.headline, *filter(None, [self.outcome]), *(f"- {remark}" for remark in self.remarks))

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """The table as text, header first: the same words in the terminal, in Markdown and on the page."""
        return (HEADER, *map(_cells, self.rows))

    def to_json(self) -> str:
        """The whole report; `Report.model_validate_json` reads it back."""
        return self.model_dump_json(indent=2)

    def markdown(self) -> str:
        """A short summary for the run's description."""
        header, *body = ("| " + " | ".join(cells) + " |" for cells in self.cells)
        table = "\n".join([header, "|---" + "|--:" * (len(HEADER) - 1) + "|", *body])
        remarks = "\n".join(f"- {remark}" for remark in self.remarks)
        parts = [f"**{self.headline}**", table, self.outcome, remarks, f"{self.hardware}. {METHOD}"]
        return "\n\n".join(part for part in parts if part) + "\n"

    def table(self) -> dict[str, list[Any]]:
        """Columns for MLflow's ``log_table``: one entry per row, spreads and metrics flat, None where unknown."""
        records = [_record(row) for row in self.rows]
        columns = dict.fromkeys(column for record in records for column in record)
        return {column: [record.get(column) for record in records] for column in columns}


def amount(value: float) -> str:
    """Three significant digits, or whole numbers with separators, e.g. "0.92" or "1,310"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        row.title,
        row.devices,
        _with_spread(row.samples_per_second),
        "baseline" if row.role == "baseline" else "-" if row.speedup is None else f"{row.speedup:.2f}x",
        shown(row.efficiency, ".0%"),
        shown(row.parts.exposed_communication_ms, ".1f"),
        shown(row.parts.data_wait_ms, ".1f"),
    )


def _with_spread(spread: Spread) -> str:
    if spread.windows < 2:
        return amount(spread.median)
    return f"{amount(spread.median)} ± {amount((spread.high - spread.low) / 2)}"


def _record(row: Row) -> dict[str, Any]:
    """One flat record of a row."""
    listed = {"metrics", "parts", "peak_memory_mb", "gpu_utilization", "losses", "repeats", "coupling"}
    times = row.parts.model_dump(exclude={"step_ms", "ranks_ms", "nodes"})
    record: dict[str, Any] = {}
    for name, value in row.model_dump(mode="json", exclude=listed).items():
        if isinstance(value, dict):  # a spread
            record |= {name: value["median"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            record[name] = value
    peaks = {"peak_memory_mb": max(row.peak_memory_mb, default=None)}
    return record | times | peaks | {"same_training": row.same_training} | dict(row.metrics)


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    """What a reader must know; nothing where the figures speak for themselves."""
    baseline, main = rows[0], rows[-1]
    if baseline.role != "baseline":
        yield "There is no baseline measurement, so no speedup is claimed."
    elif main.measures_again(baseline):
        yield f"The main trial and its baseline are both {main.title}, so no speedup is claimed."
    if any(row.is_one_replica_dp for row in rows):
        yield "dp with fewer than two GPUs is one replica; nothing runs in parallel, so no speedup is claimed for it."
    yield from (_all_cores(main, row) for row in rows if _has_all_cores(row, main))
    for row in rows:
        if row.efficiency is not None and not row.is_resolved:
            interval = f"{row.speedup:.2f}x ({row.speedup_low:.2f}x to {row.speedup_high:.2f}x)"
            yield f"The speedup of {row.title}, {interval}, is not resolved: within the noise of these windows."
    if any(row.samples_per_second.windows < 2 for row in rows):
        yield "Some throughput was measured in a single window, so its noise is unknown."


def _has_all_cores(row: Row, main: Row) -> bool:
    """Whether the row is one replica with the cores that the main trial shares among several."""
    one_on_cpu = row.role == "reference" and row.device == "cpu" and row.replicas == 1
    return one_on_cpu and main.replicas > 1 and row.cpus >= main.cpus


def _all_cores(main: Row, reference: Row) -> str:
    own, other = main.samples_per_second, reference.samples_per_second
    remark = (
        f"One process with all {reference.devices} does {amount(other.median)} samples/s: "
        f"on this machine {main.title} is {own.median / other.median:.2f}x that."
    )
    return remark if own.low > other.high else f"{remark} Data parallelism pays when devices are separate."
