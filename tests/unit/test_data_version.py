"""The version that a data function gives its data: from the training set to the commands."""

# promise: a version that the data has is recorded with its digest

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import toys
from checkpointed import run

from pipeline.protocol.events import Started
from pipeline.record.recorder import Recorder
from pipeline.record.runs import data_of

HERE = "test_data_version"


class Sets(tuple[Any, ...]):
    """What a data function may return."""

    version: str


def versioned(version: Any = "", of_tuple: str = "") -> tuple[Any, ...]:
    train_set, validation = toys.regression()
    if version:
        train_set.version = version  # type: ignore[attr-defined]
    sets = Sets((train_set, validation))
    if of_tuple:
        sets.version = of_tuple
    return sets


@pytest.mark.parametrize(
    ("arguments", "version"),
    [
        ({"version": "v3"}, "v3"),
        ({"version": "v3", "of_tuple": "9f2c"}, "9f2c"),
        ({"version": 3}, ""),  # of something else
        ({}, ""),
    ],
)
def test_the_version_is_recorded(arguments: dict[str, Any], version: str) -> None:
    outbox = run("", data={"_target_": f"{HERE}.versioned", **arguments}, allowed=HERE)
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    assert started.data_version == version


def test_the_commands_find_it(tmp_path: Path) -> None:
    event = Started(
        time=1, total_steps=1, steps_per_epoch=1, epochs=1, train_samples=1, epoch_samples=1,
        validation_samples=0, parameters=1,
        devices=(), data_name="lab.points", data_digest="abc", data_version="v3",
    )  # fmt: skip
    with closing(Recorder(tmp_path, subscribers=[])) as recorder:
        recorder.receive(event)
        recorder.receive(event.model_copy(update={"trial": "baseline", "data_digest": "", "data_version": ""}))
    assert data_of(tmp_path) == {"data digest": "abc", "data version": "v3"}
