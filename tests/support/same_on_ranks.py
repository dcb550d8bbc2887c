"""Trainings of one process, and of several from the beginning and from a checkpoint of the one, to be compared."""

import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
from ranks import on_ranks

from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

Series = dict[tuple[str, int], float]
"""Values by the name of a metric and the step."""
Cases = Mapping[str, Mapping[str, Any]]
"""Sections of an experiment by the name of a case."""


def trained(rank: Rank, folder: Path, sections: Mapping[str, Any], *, stopped: int, **update: Any) -> Series:
    """Train with checkpoints in a folder; with ``resume`` from step ``stopped`` on."""
    probe, loop.probe = loop.probe, lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(**sections, checkpoint={"every_steps": stopped, "keep": 100})
    own = {"strategy": "single" if rank.world_size == 1 else "ddp", "workers": rank.world_size}
    kept = toys.Kept()
    try:
        train(trial.model_copy(update={**own, "checkpoints": str(folder), **update}), rank=rank, outbox=kept)
    finally:
        loop.probe = probe
    warnings = [event.message for event in kept.events if isinstance(event, Warned) and event.subject != "reading"]
    assert not [each for each in warnings if not each.startswith("model: buffer count changes")]
    resumes = update.get("resume", False)
    assert ("resumed" in kept.kinds()) == (resumes and rank.is_first)
    names = {point.name for event in kept.events if event.kind == "metrics" for point in event.points}
    points = [one for name in names if name.startswith(("train/", "validation/")) for one in kept.points(name)]
    return {(one.name, one.step): one.value for one in points if one.step > stopped * resumes}


def rest(series: Series, *, stopped: int) -> Series:
    """Return the values after a step."""
    return {(name, step): value for (name, step), value in series.items() if step > stopped}


class Alone:
    """Series of one process by case, and its checkpoints."""

    def __init__(self, cases: Cases, folder: Path, *, stopped: int) -> None:
        self.cases, self.folder, self.stopped = cases, folder, stopped
        self.series = {
            name: trained(Rank(), folder / "1" / name, case, stopped=stopped) for name, case in cases.items()
        }

    def on(self, workers: int, more: Callable[[Rank, Path], Any] | None = None) -> Any:
        """Compare all cases on so many ranks, from the beginning and resumed; return what ``more`` does on rank 0."""
        folder, checkpoint = self.folder / str(workers), folder_name(self.stopped)
        for name in self.cases:
            shutil.copytree(self.folder / "1" / name / checkpoint, folder / "resumed" / name / checkpoint)
        on_ranks(_compared, folder, self.cases, self.series, self.stopped, more, folder=folder, world_size=workers)
        return pickle.loads((folder / "more").read_bytes())

    def goes_on_from(self, workers: int, case: str) -> None:
        """Continue with one process what so many ranks have saved, and compare."""
        place, checkpoint = self.folder / "continued" / str(workers) / case, folder_name(self.stopped)
        shutil.copytree(self.folder / str(workers) / "whole" / case / checkpoint, place / checkpoint)
        found = trained(Rank(), place, self.cases[case], stopped=self.stopped, resume=True)
        assert_same(found, rest(self.series[case], stopped=self.stopped), case)


def _compared(rank: Rank, folder: Path, cases: Cases, expected: Mapping[str, Series], stopped: int, more: Any) -> None:
    for name, case in cases.items():
        whole = trained(rank, folder / "whole" / name, case, stopped=stopped)
        resumed = trained(rank, folder / "resumed" / name, case, stopped=stopped, resume=True)
        if rank.is_first:
            assert_same(whole, expected[name], name)
            assert_same(resumed, rest(expected[name], stopped=stopped), name)
    found = more(rank, folder) if more is not None else None
    if rank.is_first:
        (folder / "more").write_bytes(pickle.dumps(found))


def assert_same(found: Series, expected: Series, case: str) -> None:
    """Compare all values that one process has; several also report how long gradients are exchanged."""
    assert expected
    assert {place: found.get(place) for place in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12), case
