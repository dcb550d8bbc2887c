"""Result of ``pipeline evaluate``: the values of a checkpoint on a held-out set, as a table, a line and JSON."""

from collections.abc import Mapping

from pydantic import ConfigDict

from pipeline.experiment.reported import iter_formatted
from pipeline.experiment.values import Frozen
from pipeline.protocol.events import Evaluated
from pipeline.protocol.labels import Split
from pipeline.protocol.trial import Evaluation, Trial
from pipeline.report.text.tables import ReportTable
from pipeline.wording import figure


class EvaluationReport(Frozen):
    """Values of a checkpoint on a held-out set; `pipeline.record.screen` prints it."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    name: str = ""
    """Name of the experiment."""
    run: str
    """Id of the run."""
    checkpoint: str
    """Path or address of the checkpoint's folder."""
    step: int
    epoch: int
    """Epoch of the step, counted from 1."""
    best: str
    """Metric whose best value the checkpoint has, if it was chosen for that; otherwise empty."""
    split: Split
    samples: int
    strategy: str
    workers: int
    changes: tuple[str, ...]
    """Differences from the experiment that was trained which may change the values."""
    values: Mapping[str, float]
    """Loss and metrics by reported name."""
    summary: str
    """Set and weights in words."""
    is_fallback: bool
    """True if the validation set was evaluated because the data has no test set."""
    note: str = ""
    """Note that the training ended after this checkpoint; empty if it did not, or if the checkpoint was named."""

    @classmethod
    def of(cls, found: Evaluated, *, run: str, trial: Trial, has_choice: bool) -> "EvaluationReport":
        """Make the report of an evaluation; ``has_choice`` is True if the command named the set."""
        return cls(
            name=trial.experiment.name,
            run=run,
            checkpoint=found.checkpoint,
            step=found.step,
            epoch=found.epoch,
            best=found.best,
            split=found.split,
            samples=found.samples,
            strategy=trial.strategy,
            workers=trial.workers,
            changes=found.changes,
            values=found.values,
            summary=found.subject,
            is_fallback=found.split == "validation" and not has_choice,
            note=trial.note if isinstance(trial, Evaluation) else "",
        )

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the table, the title first."""
        title = f"{self.summary[0].upper()}{self.summary[1:]}"
        fallback = ["The data has no test set, so this is the validation set."] if self.is_fallback else []
        changed = [f"Not the experiment that was trained: {change}." for change in self.changes]
        note = [f"{self.note[0].upper()}{self.note[1:]}."] if self.note else []
        return (title, *note, *fallback, *changed)

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """The table of values."""
        rows = tuple((name, figure(value)) for name, value in self.values.items())
        return (ReportTable(header=("metric", "value"), rows=rows),)

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """No lines below the table."""
        return ()

    @property
    def verdict(self) -> str:
        """Values in one line."""
        return f"{sentence(self.values)}: {self.summary}{f'; {self.note}' if self.note else ''}"


def sentence(values: Mapping[str, float]) -> str:
    """Return values in a line, e.g. "test/loss 0.1, test/accuracy 0.97"."""
    return ", ".join(iter_formatted(values))
