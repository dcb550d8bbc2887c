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
    """Result of a run or a benchmark, and the places where it is stored."""

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
        kept = TrackingOutcome.kept(folder)
        experiment, run = (kept.experiment_id, kept.run_id) if kept else ("", "")
        return cls(result, folder.resolve(), experiment or None, run or None)

    @property
    def speedup(self) -> float | None:
        """Throughput divided by the baseline's throughput; None if no speedup was measured.

        For a benchmark, this is the speedup of the configuration with the most workers.
        """
        return self._value("speedup")

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: speedup divided by the ratio of devices; None if no speedup was measured."""
        return self._value("efficiency")

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
class RunResult(Result):
    """Result of a training and its baseline."""

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


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """Result of a benchmark."""

    @property
    def best(self) -> str:
        """Name of the configuration with the highest valid speedup and the baseline's losses; else of the baseline."""
        compared = {fact.trial for fact in self.result.all_facts if fact.key == "largest_loss_difference"}
        speedups = [fact for fact in self.result.all_facts if fact.key == "speedup" and fact.state != "invalid"]
        cells = [fact for fact in speedups if fact.trial in compared - {_MAIN, "reference"}]
        return max(cells, key=lambda fact: fact.value or 0.0).trial if cells else "baseline"
