"""``pipeline tune-batch`` as a whole: two workers that must agree, its JSON, its table, and what can go wrong."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command import Ended

from pipeline.protocol.events import AnyEvent, BatchSizesFound, RunClosed
from pipeline.recording import journal
from pipeline.training import bench

HUNGRY = ("model._target_=lab.Hungry", "model.limit=5")
TWO_WORKERS = ("parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2")
Command = Callable[..., Ended]


class Tuned(NamedTuple):
    ended: Ended
    events: list[AnyEvent]

    @property
    def json(self) -> Any:
        return json.loads(self.ended.stdout)


@pytest.fixture
def tune(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuned]:
    monkeypatch.setattr(bench, "_WINDOW_SECONDS", 0.02)  # of the in-process launcher

    def run(*arguments: str) -> Tuned:
        places = (f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
        ended = command("tune-batch", "lab.yaml", *places, *arguments)
        assert "Traceback" not in ended.output
        events = [event for path in tmp_path.glob("runs/*/events.jsonl") for event in journal.read(path)]
        return Tuned(ended, events)

    return run


def test_all_ranks_agree_when_one_has_too_little_memory(tune: Callable[..., Tuned]) -> None:
    """Rank 0 alone would go on, and wait for ever in an all-reduce."""
    tuned = tune(*TWO_WORKERS, *HUNGRY, "model.rank=1", "--json")

    assert tuned.ended.code == 0, tuned.ended.output
    fits = {one["batch_size"]: one["fits"] for one in tuned.json["candidates"]}
    assert fits == {1: True, 2: True, 4: True, 5: True, 6: False, 8: False}
    assert set(tuned.json) == {
        "candidates", "largest_that_fits", "recommended", "workers", "global_batch_size", "change"
    }  # fmt: skip
    figures = (tuned.json["largest_that_fits"], tuned.json["workers"], tuned.json["global_batch_size"])
    assert figures == (5, 2, 16)
    for one in tuned.json["candidates"]:
        assert len(one["peak_memory_mb"]) == (2 if one["fits"] else 0)
        if one["fits"]:
            rate = one["samples_per_second"]
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
    split = {1: 8, 2: 4, 4: 2, 5: 2}[tuned.json["recommended"]]  # of the 8 samples of a worker
    assert tuned.json["change"] == [f"train.gradient_accumulation: {split}"]


def test_the_result_is_shown_on_stderr_beside_json_and_kept(tune: Callable[..., Tuned]) -> None:
    tuned = tune(*HUNGRY, "model.limit=2", "--json")

    (found,) = [event for event in tuned.events if isinstance(event, BatchSizesFound)]
    assert found.sizes.largest_that_fits == tuned.json["largest_that_fits"] == 2
    assert isinstance(tuned.events[-1], RunClosed)
    assert tuned.events[-1].status == "FINISHED"
    assert tuned.events[-1].summary.splitlines()[1:] == tuned.json["change"]
    for words in ("recommended", "doesn't fit", "Largest that fits: 2 samples", *tuned.json["change"]):
        assert words in tuned.ended.stderr


def test_the_table_fits_a_terminal(tune: Callable[..., Tuned], command: Command, tmp_path: Path) -> None:
    tuned = tune("train.global_batch_size=4", "--max", "4")

    assert tuned.ended.code == 0, tuned.ended.output
    assert tuned.ended.stderr == ""
    table, _, place = tuned.ended.stdout.partition("lab: batch size per device")[2].partition("\nrun      ")
    assert max(map(len, table.splitlines())) <= 80
    assert "Largest that fits: at least 4 samples; memory never ran out." in table
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # the tracking store isn't touched
    again = command("show", "latest", "--directory", f"{tmp_path}/runs")
    assert again.stdout == f"lab: batch size per device{table}\nrun      {place}"
    document = json.loads(command("show", place.splitlines()[0], "--json").stdout)
    assert document["candidates"][-1]["batch_size"] == 4


def test_not_even_one_sample_fits(tune: Callable[..., Tuned]) -> None:
    tuned = tune(*HUNGRY, "model.limit=0")

    assert tuned.ended.code == 3
    assert "not even a batch of 1 fits into the memory of each worker" in tuned.ended.stderr
    assert isinstance(tuned.events[-1], RunClosed)
    assert tuned.events[-1].status == "FAILED"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max", "0"), "greater than or equal to 1"),
        (("--max", "many"), "valid integer"),
        (
            ("parallel.workers=2", "parallel.strategy=ddp"),
            "inprocess runs one process. Set parallel.launcher to torchrun or ray.",
        ),
        (("train.batch=4",), "train.batch"),
        (("data._target_=lab.no_samples",), "the training set is empty"),
    ],
)
def test_what_cannot_work_is_refused(tune: Callable[..., Tuned], arguments: tuple[str, ...], said: str) -> None:
    ended = tune(*arguments).ended

    assert ended.code == 2, ended.output
    assert said in " ".join(ended.stderr.split())


def test_it_stops_when_it_is_told_to(project: Path, tmp_path: Path, start: Any) -> None:
    process = start("tune-batch", "lab.yaml", f"tracking.directory={tmp_path}/runs", cwd=project)
    assert "starting" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stdout + stderr
    assert "Traceback" not in stdout + stderr
    (folder,) = (tmp_path / "runs").iterdir()
    *_, last = journal.read(folder / journal.FILE_NAME)
    assert isinstance(last, RunClosed)
    assert last.status == "KILLED"
