"""Rows of an experiment each, trained in one process and divided in other ways, to be compared."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import toys
from ranks import Ranks
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.protocol.events import Resumed, Warned
from pipeline.protocol.trial import Evaluation, Rank, Trial, Weights
from pipeline.train import meter
from pipeline.train.restored import evaluate_checkpoint
from pipeline.train.run import train
from pipeline.train.storage import folder_name

WHOLE, DIVIDED, RESUMED, CONTINUED = "whole", "in micro-batches", "resumed", "continued"
BY_ONE, EVALUATED = "resumed by one", "evaluated"
COMPARISONS = (WHOLE, DIVIDED, RESUMED, CONTINUED, BY_ONE, EVALUATED)
"""Ways to train a row again, each compared with the training of one process.

Several workers train it as a whole, in two micro-batches, and from a checkpoint of the one process. Of some rows they
also continue from a checkpoint of their own, which is the same to the bit, and one process resumes it. They evaluate
the best weights that one has saved, and their own.
"""


class Row(NamedTuple):
    """An experiment whose training doesn't depend on how it is divided."""

    sections: Mapping[str, Any]  # Sections of the experiment that differ from those of `toys.experiment`
    stopped: int = 2  # Step of the checkpoint that is resumed
    strategy: str = "ddp"
    options: Mapping[str, Any] = {}  # Options of the strategy
    whole_batches: bool = False  # True if it has no micro-batches, as the samples of a global batch are compared
    initial: Callable[[], nn.Module] | None = None
    """Model whose weights, drawn with another seed, the training starts from."""
    is_saved_by_all: bool = False  # True if checkpoints of several workers are continued, too
    evaluated: tuple[str, ...] = ()  # Sets on which the best checkpoint is evaluated again
    tolerance: float = 1e-12
    counted: str = ""  # Buffer in which each process counts its own samples, which is not compared
    warned: str | tuple[str, ...] = ""  # Start of the warnings that it may have

    def has(self, comparison: str) -> bool:
        """Return True if the row is trained in this way."""
        left_out = {
            DIVIDED: self.whole_batches,
            CONTINUED: not self.is_saved_by_all,
            BY_ONE: not self.is_saved_by_all,
            EVALUATED: not self.evaluated,
        }
        return not left_out.get(comparison, False)


class Found(NamedTuple):
    """Results of a training."""

    series: dict[tuple[str, int], float]  # Values by the name of a metric and the step; of rank 0, as the weights
    weights: dict[str, Tensor]
    metrics: dict[str, float]  # Last metrics; of each rank, as its end
    end: tuple[int, str, int]  # Last step, why it was the last, and the step of the best weights or 0


def train_row(rank: Rank, row: Row, folder: Path, *, resume: bool = False, micro_batches: int = 1) -> Found:
    """Train a row with checkpoints in a folder."""
    kept = toys.Kept()
    with warnings.catch_warnings(), patch.object(meter, "REPORT_MS", 1e9):  # none by time, which a busy machine shifts
        warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)  # torchmetrics, of a class
        result = train(_trial(row, rank, folder, resume=resume, micro_batches=micro_batches), rank=rank, outbox=kept)
    _check_events(kept, row, resumed=[row.stopped] * (resume and rank.is_first))
    points = [point for event in kept.events if event.kind == "metrics" for point in event.points]
    series = {
        (point.name, point.step): point.value
        for point in points
        if point.name.startswith(("train/", "validation/", "test/")) and point.step > row.stopped * resume
        if point.name != "train/skipped_steps"  # once a report
    }
    best = result.best.step if result.best else 0
    weights = kept.files.get("model/weights.pt", {})
    return Found(series, weights, dict(result.metrics), (result.steps, result.stopped_early, best))


def _trial(row: Row, rank: Rank, folder: Path, *, resume: bool, micro_batches: int) -> Trial:
    """A training that measures nothing; in one process without a strategy."""
    sections = dict(row.sections)
    divided = {"gradient_accumulation": micro_batches} if micro_batches > 1 else {}
    start = {"start_from": {"file": "initial.safetensors"}} if row.initial else {}
    sections["train"] = {**sections.get("train", {}), **divided, **start}
    sections["checkpoint"] = {"every_steps": row.stopped, "keep": 100, **sections.get("checkpoint", {})}
    initial = Weights(path=_initial(row, folder), source="drawn") if row.initial and rank.is_first else None
    return toys.trial(**sections, **_way(row, rank), checkpoints=str(folder), resume=resume, initial=initial)


def _way(row: Row, rank: Rank) -> dict[str, Any]:
    alone = rank.world_size == 1
    strategy = {"strategy": "single", "options": {}} if alone else {"strategy": row.strategy, "options": row.options}
    return {**strategy, "workers": rank.world_size}


def _initial(row: Row, folder: Path) -> str:
    assert row.initial is not None
    path = folder.with_suffix(".safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(9)
        save_file(row.initial().state_dict(), path)
    return str(path)


def _check_events(kept: toys.Kept, row: Row, *, resumed: list[int]) -> None:
    assert [event.step for event in kept.events if isinstance(event, Resumed)] == resumed
    said = [event.message for event in kept.events if isinstance(event, Warned) and event.subject != "reading"]
    unexpected = [message for message in said if not row.warned or not message.startswith(row.warned)]
    assert not unexpected, unexpected


class Compared:
    """A row that one process and several have trained, in all ways that it has."""

    def __init__(self, row: Row, folder: Path, ranks: Ranks) -> None:
        self.row, self.folder = row, folder
        self.alone = train_row(Rank(), row, folder / "alone")
        assert row.stopped < self.alone.end[0]
        _copy_checkpoints(folder / "alone", folder / RESUMED, until=row.stopped)
        self.divided = ranks.call(_train_divided, row, folder, self.alone.end[2])

    def check_all(self) -> None:
        """Compare all ways that the row has."""
        for comparison in COMPARISONS:
            if self.row.has(comparison):
                self.check(comparison)

    def check(self, comparison: str) -> None:
        """Compare one way with the training of one process."""
        if comparison == BY_ONE:
            self._check_by_one()
            return
        expected = self._evaluated() if comparison == EVALUATED else self.alone
        is_resumed = comparison in (RESUMED, CONTINUED)
        found = [one[comparison] for one in self.divided]
        self._compare(found, expected, after=self.row.stopped * is_resumed, tolerance=self.row.tolerance)
        if comparison == CONTINUED:
            whole = [one[WHOLE] for one in self.divided]
            self._compare(found[:1], whole[0], after=self.row.stopped, tolerance=0.0)

    def _check_by_one(self) -> None:
        _copy_checkpoints(self.folder / WHOLE, self.folder / BY_ONE, until=self.row.stopped)
        found = train_row(Rank(), self.row, self.folder / BY_ONE, resume=True)
        self._compare([found], self.alone, after=self.row.stopped, tolerance=self.row.tolerance)

    def _evaluated(self) -> Found:
        """Results of the training as an evaluation has them."""
        step = self.alone.end[2]
        metrics = {f"{split}/loss": self.alone.metrics[f"{split}/loss"] for split in self.row.evaluated}
        assert evaluate_row(Rank(), self.row, self.folder / "alone", step=step).metrics == metrics
        by_others = evaluate_row(Rank(), self.row, self.folder / WHOLE, step=step).metrics
        assert by_others == pytest.approx(metrics, abs=self.row.tolerance)
        return Found({}, {}, metrics, (step, "", step))

    def _compare(self, found: list[Found], expected: Found, *, after: int, tolerance: float) -> None:
        def same(value: Any) -> Any:
            return pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)

        series = {place: value for place, value in expected.series.items() if place[1] > after}
        reached = {place: found[0].series.get(place) for place in series}  # several workers report more
        different = {place: (reached[place], value) for place, value in series.items() if reached[place] != same(value)}
        assert not different, different
        assert found[0].weights.keys() == expected.weights.keys()
        for name in expected.weights.keys() - {self.row.counted}:
            weight = expected.weights[name]
            torch.testing.assert_close(found[0].weights[name], weight, rtol=0, atol=tolerance, msg=name)
        for one in found:
            assert one.end == expected.end
            assert one.metrics == same(expected.metrics)


def _train_divided(rank: Rank, row: Row, folder: Path, best: int) -> dict[str, Found]:
    """Train a row on a rank, in all ways that need several; ``best`` is the step of its best weights."""
    found = {WHOLE: train_row(rank, row, folder / WHOLE)}
    if row.has(DIVIDED):
        found[DIVIDED] = train_row(rank, row, folder / DIVIDED, micro_batches=2)
    found[RESUMED] = train_row(rank, row, folder / RESUMED, resume=True)
    if row.has(CONTINUED):
        if rank.is_first:
            _copy_checkpoints(folder / WHOLE, folder / CONTINUED, until=row.stopped)
        dist.barrier()
        found[CONTINUED] = train_row(rank, row, folder / CONTINUED, resume=True)
    if row.has(EVALUATED):
        own, other = (evaluate_row(rank, row, folder / saved, step=best) for saved in (WHOLE, "alone"))
        assert own.metrics == pytest.approx(other.metrics, abs=row.tolerance)
        found[EVALUATED] = own
    return found


def evaluate_row(rank: Rank, row: Row, folder: Path, *, step: int) -> Found:
    """Evaluate a checkpoint on the sets of a row."""
    made = toys.trial(**row.sections, **_way(row, rank))
    shared = {name: getattr(made, name) for name in Trial.model_fields if name != "role"}
    shared |= {"checkpoints": str(folder), "step": step}
    metrics = {}
    for split in row.evaluated:
        values = evaluate_checkpoint(Evaluation(**shared, split=split), rank=rank, outbox=toys.Kept()).values
        metrics[f"{split}/loss"] = values[f"{split}/loss"]
    return Found({}, {}, metrics, (step, "", step))


def _copy_checkpoints(source: Path, target: Path, *, until: int) -> None:
    """Copy the checkpoints up to a step, which must be one of them."""
    for step in range(1, until + 1):
        if (source / folder_name(step)).exists():
            shutil.copytree(source / folder_name(step), target / folder_name(step))
    assert (target / folder_name(until)).exists()
