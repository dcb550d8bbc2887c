"""The report of `pipeline sweep`: each trial with its values and its metric, and the best trial."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from pipeline.experiment.values import Frozen
from pipeline.report.text.tables import ReportTable
from pipeline.wording import figure as rounded
from pipeline.wording import link

FILE_NAME = "sweep.json"
"""File name of a `SweptReport` in a sweep's folder."""
CSV_NAME = "sweep.csv"

State = Literal["finished", "stopped early", "failed", "interrupted", "running", "not begun"]
LEFT: tuple[State, ...] = ("interrupted", "not begun")
"""States of trials that a resumed sweep continues with."""
STATES: Mapping[State, str] = {
    "finished": "completed",
    "stopped early": "stopped early",
    "failed": "failed",
    "interrupted": "interrupted",
    "running": "running",
    "not begun": "not started",
}
"""States in words."""
_MOST_DESCRIBED = 20
"""Trials in the description of the sweep's run, the best ones; MLflow cuts a description after 8000 characters."""


class SweptTrial(Frozen):
    """One trial of a sweep."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    number: int
    """Number of the trial, from 1."""
    values: Mapping[str, Any]
    """Values that the trial sets, by dotted key."""
    variant: str = ""
    """Name of the variant that it trains, in a study of ``pipeline compare``; empty in a sweep."""
    state: State
    message: str = ""
    """Error of a failed trial, or the reason why it was stopped."""
    value: float | None = None
    """Last value of the sweep's metric; None if it was never evaluated."""
    epochs: int = 0
    """Epochs trained when the metric was evaluated last."""
    steps: int = 0
    run: str
    """Id of the trial's run, for `pipeline show`."""

    @property
    def name(self) -> str:
        """Short name, e.g. "trial 3", or "B, seed 18" in a study."""
        return f"{self.variant}, seed {self.values['seed']}" if self.variant else f"trial {self.number}"


class Swept(Frozen):
    """Output of ``pipeline sweep --json``."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    experiment: str
    metric: str
    mode: Literal["min", "max"]
    search: str
    seed: int
    trials: tuple[SweptTrial, ...]
    best: int | None
    """Number of the best trial that finished; None if no trial finished."""
    command: tuple[str, ...]
    """Command that trains the best trial again; empty without a best trial."""
    confirmation: tuple[str, ...] = ()
    """Command that compares the best two settings with new seeds; empty if no two settings completed."""
    run: str
    """Id of the sweep's run."""
    log_scaled: tuple[str, ...] = ()
    """Keys whose values are spread over orders of magnitude: drawn with a uniform logarithm, or listed so."""

    def describe_missing_best(self) -> str:
        """Return why there is no best trial."""
        if any(trial.state == "finished" for trial in self.trials):
            return f"{self.metric} is NaN in all completed trials, so there is no best trial"
        return "No trial completed, so there is no best trial"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the sweep varies."""
        return tuple(dict.fromkeys(key for trial in self.trials for key in trial.values))

    @property
    def by_merit(self) -> tuple[SweptTrial, ...]:
        """Trials with the best first: those that finished, then those that didn't, then those without a value."""
        sign = 1 if self.mode == "min" else -1

        def place(trial: SweptTrial) -> tuple[bool, bool, bool, float]:
            unknown = trial.value is None or math.isnan(trial.value)
            merit = 0.0 if trial.value is None or unknown else sign * trial.value
            return trial.number != self.best, unknown, trial.state != "finished", merit

        return tuple(sorted(self.trials, key=place))

    def titled(self, trial: SweptTrial) -> str:
        """Return number and values of a trial, e.g. "trial 3: lr=0.05, momentum=0.9"."""
        return f"trial {trial.number}: {assigned(trial.values)}"

    def trial(self, number: int | None) -> SweptTrial | None:
        """Return the trial of this number, or None."""
        return next((trial for trial in self.trials if trial.number == number), None)


class SweptReport(Frozen):
    """The report of a sweep for people."""

    swept: Swept
    hardware: str
    logs_model: bool = False
    """True if the best trial's model, and no other model, is logged to MLflow."""

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.swept.experiment

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the table: experiment and machine."""
        return f"{self.swept.experiment}: {len(self.swept.trials)} trials, {self.swept.metric}", self.hardware

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """Table with a row for each trial, in the order of their numbers."""
        return (self._table(self.swept.trials),)

    def _table(self, trials: Sequence[SweptTrial]) -> ReportTable:
        keys, best = self.swept.keys, self.swept.best
        notes = (f"trial {trial.number} failed: {trial.message}" for trial in trials if trial.state == "failed")
        return ReportTable(
            header=("trial", *short_names(keys), self.swept.metric, "epochs", "state"),
            rows=tuple(_row(trial, keys, is_best=trial.number == best) for trial in trials),
            emphasis=next((i for i, trial in enumerate(trials) if trial.number == best), None),
            notes=tuple(notes),
        )

    @property
    def verdict(self) -> str:
        """Best trial in one line."""
        if (best := self.swept.trial(self.swept.best)) is None:
            return self.swept.describe_missing_best()
        of = f"trial {best.number} of {len(self.swept.trials)}"
        return f"Best: {of}, {self.swept.metric} {figure(best.value)} ({assigned(best.values)})"

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the table: trials that are left, and where the model is."""
        lines = tuple(self._told())
        return (lines,) if lines else ()

    def _told(self) -> Iterator[str]:
        best = self.swept.trial(self.swept.best)
        left = sum(trial.state in LEFT for trial in self.swept.trials)
        if left:
            yield f"{left} of {len(self.swept.trials)} trials are left; --resume continues with them."
        if best is None:
            return
        if self.logs_model:
            others = "; the weights of the other trials stay in their folders" if len(self.swept.trials) > 1 else ""
            yield f"The model of trial {best.number} is logged to its run in MLflow{others}."
        yield f"To train trial {best.number} again:"

    @property
    def command(self) -> str:
        """Shell command that trains the best trial again; empty without a best trial."""
        return " ".join(self.swept.command)

    def markdown(self) -> str:
        """Return the best trial and a table in Markdown, for the description of the sweep's run in MLflow.

        Its links are completed where it is written to the store, see `pipeline.wording.complete_links`.
        """
        swept, listed = self.swept, self.swept.by_merit[:_MOST_DESCRIBED]
        table = self._table(listed)
        lines = [f"**{self.verdict}**", "", *self._told(), ""]
        lines += [f"`{self.command}`", ""] if self.command else []  # a block of code would widen the page
        lines += [f"| {' | '.join(table.header)} |", f"|{'---|' * len(table.header)}"]
        for trial, (number, *cells) in zip(listed, table.rows, strict=True):
            first = link(number, run=trial.run) if trial.state != "not begun" else number
            lines.append(f"| {' | '.join([first, *(cell.replace('|', '/') for cell in cells)])} |")
        if others := len(swept.trials) - len(listed):
            lines += ["", f"These are the best. {CSV_NAME} has all trials: {others} more."]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return the trials as CSV, with the full keys of their values."""
        swept, text = self.swept, io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["trial", *swept.keys, swept.metric, "epochs", "steps", "state", "best", "run"])
        for trial in swept.trials:
            values = [trial.values.get(key) for key in swept.keys]
            end = (trial.value, trial.epochs, trial.steps, trial.state, trial.number == swept.best, trial.run)
            writer.writerow([trial.number, *values, *end])
        return text.getvalue()


def short_names(keys: Sequence[str]) -> list[str]:
    """Shorten keys to column heads: their last part, or more parts where two heads would be equal."""
    parts = [key.split(".") for key in keys]
    names = [".".join(part[-1:]) for part in parts]
    depth = 2
    while len(set(names)) < len(names) and depth <= max(map(len, parts)):
        names = [
            ".".join(part[-depth:]) if names.count(name) > 1 else name for part, name in zip(parts, names, strict=True)
        ]
        depth += 1
    return names


def _row(trial: SweptTrial, keys: Sequence[str], *, is_best: bool) -> tuple[str, ...]:
    state = "best" if is_best else STATES[trial.state]
    values = [shown(trial.values.get(key)) for key in keys]
    return (str(trial.number), *values, figure(trial.value), str(trial.epochs or "-"), state)


def shown(value: object) -> str:
    """Format a value of a parameter: of a component, only the name of its class."""
    if isinstance(value, Mapping):
        return str(value.get("_target_", dict(value))).rpartition(".")[2]
    if isinstance(value, str) and "." in value:
        return value.rpartition(".")[2]
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def assigned(values: Mapping[str, Any]) -> str:
    """Format the values of a trial, e.g. "lr=0.01, width=64"."""
    names = short_names(list(values))
    return ", ".join(f"{name}={shown(value)}" for name, value in zip(names, values.values(), strict=True))


def figure(value: float | None) -> str:
    """Format a value of the sweep's metric, in the same way in terminal, report, description and tags."""
    return "-" if value is None else rounded(value)
