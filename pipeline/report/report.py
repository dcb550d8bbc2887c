"""The report of a run or a comparison: rows, notes, advice, and their forms as text, tables and JSON."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.experiment.values import Recorded
from pipeline.plan.plan import restriction, scheduler_units
from pipeline.protocol.events import LOSSES, Evaluated, Finished
from pipeline.protocol.labels import Role
from pipeline.protocol.trial import Training, Trial
from pipeline.report.numbers import records
from pipeline.report.numbers.forecast import Forecast, Predicted
from pipeline.report.numbers.row import Advice, Row, Unmeasured, find_main_row
from pipeline.report.text import device, sentences, tables
from pipeline.report.text.tables import ReportTable
from pipeline.results.goodput import Goodput

_ORDER: tuple[Role, ...] = ("baseline", "reference", "cell", "main")


class Report(Recorded):
    """Result of a run or of a comparison."""

    name: str
    """Name of the experiment."""
    rows: tuple[Row, ...]
    """Rows in order: baseline, references by replicas, cells of a comparison, main training."""
    unmeasured: tuple[Unmeasured, ...] = ()
    """Cells of a comparison that were not measured."""
    order: tuple[str, ...]
    """Trial names of all rows and unmeasured cells, in the order of the tables."""
    remarks: tuple[str, ...] = ()
    """Notes on the numbers."""
    advice: tuple[Advice, ...] = ()
    price_per_device_hour: float | None = None
    """See ``benchmark.price_per_device_hour``."""
    forecast: Forecast | None = None
    """Predicted rows of a benchmark; None if nothing was to be predicted."""
    goodput: Goodput | None = None
    """Use of the training's wall clock; None for a comparison."""
    hardware: str
    launcher: str
    """Launcher of the trials."""
    is_quick: bool = False
    """True for a run that only tested whether the experiment works."""
    restriction: str = ""
    """Option that left the measurements out; empty if something was to be measured."""
    training_notes: tuple[str, ...] = ()
    """Events of the training that change its result, e.g. another number of workers."""

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        finished: Sequence[Finished],
        *,
        hardware: str,
        unmeasured: Sequence[Unmeasured] = (),
        order: Sequence[str] = (),
    ) -> "Report":
        """Build the report of trials, each of which finished once or several times.

        A trial that didn't finish and isn't in ``unmeasured`` is left out, with a remark.

        Args:
            trials: all planned trials; those with ``repeat`` above 0 are ignored.
            finished: results of the trials.
            hardware: description of the machine.
            unmeasured: cells without figures.
            order: trial names of the cells in the requested order; default: trials, then unmeasured cells.

        Raises:
            ValueError: no trial finished, or the main trial of a run didn't finish.
        """
        ends: dict[str, list[Finished]] = {}
        for end in finished:
            ends.setdefault(end.result.trial, []).append(end)
        once = {trial.name: trial for trial in trials if trial.repeat == 0}
        rows = [Row.of(trial, ends[name]) for name, trial in once.items() if name in ends]
        mains = [trial.name for trial in once.values() if isinstance(trial, Training)]
        if not rows or any(name not in ends for name in mains):
            raise ValueError(f"nothing to report: only {', '.join(ends) or 'no trial'} finished")
        entries = _sorted([*rows, *unmeasured], order=order)
        rows = [entry for entry in entries if isinstance(entry, Row)]
        if rows[0].role == "baseline":
            rows = [rows[0], *(row.against(rows[0]) for row in rows[1:])]
        price = next(iter(once.values())).experiment.benchmark.price_per_device_hour
        rows = device.completed(rows, price=price)
        reasons = {cell.trial for cell in unmeasured}
        missing = [f"{name} ({trial.title})" for name, trial in once.items() if name not in {*ends, *reasons}]
        report = cls(
            name=next(iter(once.values())).experiment.name,
            rows=tuple(rows),
            unmeasured=tuple(entry for entry in entries if isinstance(entry, Unmeasured)),
            order=tuple(entry.trial for entry in entries),
            hardware=hardware,
            price_per_device_hour=price,
            launcher=next(iter(once.values())).launcher,
            is_quick=any(isinstance(trial, Training) and trial.is_quick for trial in once.values()),
            restriction=next(filter(None, map(restriction, once.values())), ""),
        )
        left_out = (f"{trial} did not finish; it is left out." for trial in missing)
        extras = (f"All trials use {extra}." for extra in next(iter(once.values())).experiment.train.extras)
        remarks = sentences.iter_remarks(rows, main=report.main, restriction=report.restriction)
        units = (f"{note}." for note in scheduler_units(next(iter(once.values())).experiment))
        return report.model_copy(update={"remarks": (*left_out, *remarks, *extras, *units)})

    def with_forecast(self, forecast: Forecast, *, missing: Sequence[Unmeasured]) -> "Report":
        """Return the report with predicted rows, and with those that cannot be predicted."""
        unmeasured, order = (*self.unmeasured, *missing), (*self.order, *(cell.trial for cell in missing))
        return self.model_copy(update={"forecast": forecast, "unmeasured": unmeasured, "order": order})

    @property
    def is_comparison(self) -> bool:
        """True for a matrix of measurements, False for one training."""
        return self.rows[-1].role != "main"

    @property
    def entries(self) -> tuple[Row | Unmeasured, ...]:
        """Rows and unmeasured cells in the order of the tables."""
        named: dict[str, Row | Unmeasured] = {row.trial: row for row in self.rows}
        named |= {cell.trial: cell for cell in self.unmeasured}
        return tuple(named[name] for name in self.order)

    @property
    def predicted(self) -> tuple[Predicted, ...]:
        """Predicted rows, which are below the entries in the tables."""
        return self.forecast.rows if self.forecast else ()

    @property
    def main(self) -> Row:
        """Row that the result is about, see `find_main_row`."""
        return find_main_row(self.rows)

    @property
    def speedup(self) -> float | None:
        """Speedup of the main row; None if no speedup can be claimed."""
        return self.main.speedup

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency of the main row, 1 is linear; None if no speedup can be claimed."""
        return self.main.efficiency

    @property
    def verdict(self) -> str:
        """Result in one line."""
        return sentences.describe_result(self.rows, is_quick=self.is_quick)

    @property
    def outcome(self) -> str:
        """Final metrics and costs of the main training; empty for a comparison."""
        return "" if self.is_comparison else sentences.describe_outcome(self.main)

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables in the terminal, the title first."""
        return self.name, self.hardware, self.verdict

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the tables in the terminal, each block with its title: final metrics, notes, recommendations."""
        return tuple((title, *lines) for title, lines in self.notes if lines)

    @property
    def notes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Titles and lines of all that is said below the tables; notes and recommendations are numbered."""
        return (
            ("Final metrics", tuple(filter(None, [self.outcome]))),
            ("Goodput", (self.goodput.sentence,) if self.goodput else ()),
            ("Communication", self.communication),
            ("Compute utilization", self.devices),
            ("Notes", numbered(self.all_notes)),
            ("Recommendations", numbered(sentences.format_advice(self.advice))),
        )

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Events of the training, and notes on the numbers."""
        happened = () if self.is_comparison else sentences.iter_training_notes(self.main, self.training_notes)
        return (*happened, *self.remarks, *(self.forecast.notes if self.forecast else ()))

    @property
    def communication(self) -> tuple[str, ...]:
        """Lines on gradient synchronization while the main row trained; none for a comparison."""
        return () if self.is_comparison else tuple(sentences.describe_communication(self.main))

    @property
    def devices(self) -> tuple[str, ...]:
        """Lines on the use of the devices: operations per second, utilization, energy, price."""
        used = () if self.is_comparison else device.use(self.main)
        return (*used, *device.costs((*self.rows, *self.predicted), price=self.price_per_device_hour))

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """Tables for the terminal; none is empty."""
        shown = (self.results, *([self.step_parts] if self.has_parts else []))
        return (*shown, self.resources) if self.is_comparison else shown

    @property
    def has_parts(self) -> bool:
        """True if the parts of a step were measured, for any row."""
        return any(row.parts.sum_ms is not None for row in self.rows)

    @property
    def results(self) -> ReportTable:
        """Throughput, speedup and efficiency."""
        return tables.results((*self.entries, *self.predicted), main=self.main)

    @property
    def step_parts(self) -> ReportTable:
        """Parts of a step."""
        return tables.step_parts(self.rows, self.predicted)

    @property
    def resources(self) -> ReportTable:
        """Memory, startup time and, in a comparison, operations per second."""
        return tables.resources(self.rows, more=device.columns(self.rows) if self.is_comparison else ())

    def to_json(self) -> str:
        """Return the whole report as JSON; `Report.model_validate_json` reads it back."""
        return self.model_dump_json(indent=2)

    def markdown(self) -> str:
        """Return a short summary in Markdown, for the description of the MLflow run."""
        table = self.results
        header, *body = ("| " + " | ".join(cells) + " |" for cells in (table.header, *table.rows))
        lines = "\n".join([header, "|---" + "|--:" * (len(table.header) - 1) + "|", *body])
        below = "\n".join(f"- {note}" for note in table.notes)
        blocks = ("\n".join([f"**{title}**", "", *block]) for title, *block in self.blocks)
        parts = [f"**{self.verdict}**", lines, below, *blocks, f"{self.hardware}."]
        return "\n\n".join(part for part in parts if part) + "\n"

    def table(self) -> dict[str, list[Any]]:
        """Return the columns for MLflow's ``log_table``."""
        return records.columns((*self.entries, *self.predicted))


def run_json(report: Report, folder: Path, *, evaluations: Iterable[Evaluated] = ()) -> str:
    """Return a run with later evaluations as JSON, see `pipeline.report.numbers.records.RunRecord`."""
    cells = {row.trial: records.build_cell(row) for row in report.rows}
    first = report.rows[0]
    record = records.RunRecord(
        run=folder.name,
        folder=str(folder),
        main=cells[report.main.trial],
        baseline=cells[first.trial] if first.role == "baseline" else None,
        references=tuple(cells[row.trial] for row in report.rows if row.role == "reference"),
        metrics=report.main.metrics,
        losses=str(folder / LOSSES) if (folder / LOSSES).exists() else "",
        best=report.main.best,
        unsaved=report.main.unsaved,
        goodput=report.goodput.figures if report.goodput else None,
        evaluations=tuple(map(records.build_evaluation, evaluations)),
        **{name: getattr(report, name) for name in ("advice", "name", "hardware", "remarks", "verdict")},
    )
    return record.model_dump_json(indent=2)


def comparison_json(report: Report) -> str:
    """Return a comparison as JSON, see `pipeline.report.numbers.records.ComparisonRecord`."""
    reference = next((row for row in report.rows if row.role == "reference"), None)
    entries = (*report.entries, *report.predicted)
    record = records.ComparisonRecord(
        forecast=report.forecast and report.forecast.model_copy(update={"rows": ()}),
        cells=tuple(records.build_cell(entry) for entry in entries if entry != reference),
        reference=records.build_cell(reference) if reference else None,
        **{name: getattr(report, name) for name in ("advice", "name", "hardware", "remarks", "verdict")},
    )
    return record.model_dump_json(indent=2)


def numbered(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines with numbers from 1."""
    return tuple(f"{number}. {line}" for number, line in enumerate(lines, start=1))


def _sorted(entries: Sequence[Row | Unmeasured], *, order: Sequence[str]) -> list[Row | Unmeasured]:
    def place(entry: Row | Unmeasured) -> tuple[int, int]:
        role = entry.role if isinstance(entry, Row) else "cell"
        if isinstance(entry, Row) and role == "reference":
            return _ORDER.index(role), entry.replicas
        asked = order.index(entry.trial) if entry.trial in order else len(order)
        return _ORDER.index(role), asked

    return sorted(entries, key=place)  # stable
