"""Results of a run or a benchmark in Python; a notebook shows table and figures."""

import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipeline.protocol.events import Metrics
from pipeline.protocol.numbers import is_of_whole_run
from pipeline.record import journal, loss_file
from pipeline.report.numbers.row import Row
from pipeline.report.page.html import fragment
from pipeline.report.report import Report
from pipeline.report.report_files import CHART_NAME
from pipeline.results import record
from pipeline.results.mlflow_names import table_json
from pipeline.results.page import FILE_NAME as PAGE_NAME
from pipeline.results.terminal import format_screen
from pipeline.tracking.outcome import TrackingOutcome, places_of

if TYPE_CHECKING:
    import pandas as pd

_MAIN = "main"  # name of the trial
_METRICS = ("train/", "validation/", "test/")


@dataclass(frozen=True, repr=False)
class Result:
    """Report of a benchmark, and the places where it is stored."""

    report: Report
    """Results with notes and recommendations."""
    folder: Path
    """Folder of the run: event log, report, chart, worker logs."""
    mlflow_experiment_id: str | None
    """Id of the MLflow experiment; None if MLflow never answered."""
    mlflow_run_id: str | None
    """Id of the main MLflow run; None if MLflow never answered."""

    @classmethod
    def of(cls, report: Report, folder: Path) -> Self:
        """Return the result of a run that has ended."""
        kept = TrackingOutcome.read(folder)
        experiment, run = (kept.experiment_id, kept.run_id) if kept else ("", "")
        return cls(report, folder.resolve(), experiment or None, run or None)

    @property
    def speedup(self) -> float | None:
        """Throughput divided by the baseline's throughput; None if no speedup was measured.

        For a benchmark, this is the speedup of the configuration with the most workers.
        """
        return self.report.speedup

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: speedup divided by the ratio of devices; None if no speedup was measured."""
        return self.report.efficiency

    @property
    def chart(self) -> Path:
        """Path of the speedup chart (PNG); the file does not exist with ``train_only``."""
        return self.folder / CHART_NAME

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row for each trial, with the columns of MLflow's speedup_table.json; None for unknown values.

        Results come first, then metrics, step time, resources, what ran, and details.
        """
        import pandas as pd

        return pd.DataFrame(self.report.table()).set_index("trial")

    def __str__(self) -> str:
        return f"{self.report.name}: {self.report.verdict}\n{places_of(self.folder)}"

    def __repr__(self) -> str:
        """Identify the run only: an interactive Python prints this after `run` has printed the result."""
        return f"{type(self).__name__}({self.report.name}: {self.folder})"

    def _repr_html_(self) -> str:
        return fragment(self.report, self.chart, places=places_of(self.folder))


@dataclass(frozen=True, repr=False)
class RunResult:
    """Result of a training and its baseline."""

    result: record.Result
    """Answer, facts, tables, notes and advice."""
    folder: Path
    """Folder of the run: event log, result, page, worker logs."""
    mlflow_experiment_id: str | None
    """Id of the MLflow experiment; None if MLflow never answered."""
    mlflow_run_id: str | None
    """Id of the main MLflow run; None if MLflow never answered."""

    @classmethod
    def of(cls, result: record.Result, folder: Path) -> Self:
        """Return the result of a run that has ended."""
        kept = TrackingOutcome.read(folder)
        experiment, run = (kept.experiment_id, kept.run_id) if kept else ("", "")
        return cls(result, folder.resolve(), experiment or None, run or None)

    @property
    def speedup(self) -> float | None:
        """Throughput divided by the baseline's throughput; None if no speedup was measured."""
        return self._value("speedup")

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: speedup divided by the ratio of devices; None if no speedup was measured."""
        return self._value("efficiency")

    @property
    def metrics(self) -> Mapping[str, float]:
        """Last value of each metric of the training, e.g. "validation/accuracy"."""
        facts = (fact for fact in self.result.all_facts if fact.trial == _MAIN and fact.key.startswith(_METRICS))
        return {fact.key: math.nan if fact.value is None else fact.value for fact in facts}

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step of the training, the mean over its global batch."""
        return loss_file.read(self.folder) or tuple(self.history()["train/loss"].dropna())

    def history(self) -> "pd.DataFrame":
        """Return each metric of the training by step, counted from 1; NaN in steps without a value."""
        import pandas as pd

        values: dict[str, dict[int, float]] = {}
        for event in journal.read(self.folder / journal.FILE_NAME):
            if isinstance(event, Metrics) and event.trial == _MAIN:
                for point in (point for point in event.points if not is_of_whole_run(point.name)):
                    values.setdefault(point.name, {})[point.step] = point.value
        return pd.DataFrame(values).sort_index().rename_axis("step")

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row for each trial and a column for each fact, NaN for unknown values."""
        import pandas as pd

        table = json.loads(table_json(self.result))
        return pd.DataFrame(table["data"], columns=table["columns"]).set_index("trial")

    def _value(self, key: str) -> float | None:
        fact = self.result.fact(key)
        return None if fact is None else fact.value

    def __str__(self) -> str:
        return f"{self.result.name}: {self.result.verdict}\n{places_of(self.folder)}"

    def __repr__(self) -> str:
        """Identify the run only: an interactive Python prints this after `run` has printed the result."""
        return f"{type(self).__name__}({self.result.name}: {self.folder})"

    def _repr_html_(self) -> str:
        page = self.folder / PAGE_NAME
        drawn = re.findall(r"<svg.*?</svg>", page.read_text("utf-8"), re.DOTALL) if page.is_file() else []
        return f"<pre>{html.escape(chr(10).join(format_screen(self.result)))}</pre>{''.join(drawn)}"


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """Result of a benchmark."""

    @property
    def best(self) -> Row:
        """Configuration with the highest speedup and the baseline's batches; the baseline if none was measured."""
        first, *others = self.report.rows
        cells = [row for row in others if row.role == "cell" and row.global_batch_size == first.global_batch_size]
        return max(cells, key=lambda row: row.speedup or 0.0, default=first)
