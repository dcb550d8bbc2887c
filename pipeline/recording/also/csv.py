"""CSV tables of a run's metrics: a row for each step, a column for each metric, a file for each trial."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pipeline.protocol.events import AnyEvent, Metrics, SystemMetrics
from pipeline.protocol.trial import EVALUATION
from pipeline.recording.scalars import rows

_FIRST = ("step", "epoch", "time")
Row = Mapping[str, float]


class Tracker:
    """Tracker that writes ``metrics.csv``; ``metrics-TRIAL.csv`` for other trials, ``metrics-system.csv`` for nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, _Table] = {}

    def receive(self, event: AnyEvent) -> None:
        """Add the points of an event."""
        first = {"epoch": event.epoch, "time": event.time} if isinstance(event, Metrics) else {"time": event.time}
        if found := rows(event):
            self._table(event).add({"step": step, **first, **row} for step, row in found.items())

    def close(self) -> None:
        """Write the last rows, which could have got more values."""
        for table in self._tables.values():
            table.add(())

    def _table(self, event: AnyEvent) -> "_Table":
        trial = "system" if isinstance(event, SystemMetrics) else event.trial
        name = "metrics.csv" if trial in ("main", EVALUATION) else f"metrics-{trial}.csv"
        if name not in self._tables:
            self._tables[name] = _Table(self._folder / name)
        return self._tables[name]


class _Table:
    """A CSV file that gets new columns when there are new metrics."""

    def __init__(self, path: Path) -> None:
        self._path, self._columns = path, list(_FIRST)
        self._last: dict[str, float] = {}
        path.write_text("")  # an earlier session of the run may have written it; its events come again

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows in the order of their steps; without any, write the last one.

        Values of one step that come one after the other share a row, such as those of training and validation.
        """
        complete: list[Row] = []
        for row in rows or ({},):
            if row.get("step") != self._last.get("step") or self._last.keys() & row.keys() - {*_FIRST}:
                complete.append(self._last)
                self._last = {}
            self._last |= row
        if new := dict.fromkeys(name for row in complete for name in row if name not in self._columns):
            self._widen(new)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerows(row for row in complete if row)

    def _widen(self, columns: Iterable[str]) -> None:
        """Write the file again with more columns."""
        self._columns += columns
        partial = self._path.with_suffix(".partial")
        with self._path.open(newline="") as before, partial.open("w", newline="") as file:
            table = csv.DictWriter(file, self._columns)
            table.writeheader()
            table.writerows(csv.DictReader(before))
        partial.replace(self._path)


def places(folder: Path) -> Iterator[str]:
    """Yield the table of the training."""
    if (path := folder / "metrics.csv").exists():
        yield f"csv      {path}"
