"""A disk that is full for a while costs checkpoints, no training."""

# promise: an older checkpoint is never the last in silence

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from census import injected
from recordings import copied, written_here

from pipeline.protocol.events import AnyEvent, Metrics, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.checkpoints.manifest import step_of
from pipeline.training.checkpoints.storage import Storage
from pipeline.training.checkpoints.writer import AsyncCheckpointWriter
from pipeline.training.loop import train


def trial(address: Path | str, *, resume: bool = False, **sections: Any) -> Trial:
    update = {"checkpoints": str(address), "resume": resume}
    return toys.trial(**sections).model_copy(update=update)


def run(address: Path | str, *, resume: bool = False, outbox: toys.Kept | None = None, **sections: Any) -> toys.Kept:
    outbox = outbox or toys.Kept()
    train(trial(address, resume=resume, **sections), rank=Rank(), outbox=outbox)
    return outbox


def warnings(outbox: toys.Kept) -> list[str]:
    return [event.message for event in outbox.events if isinstance(event, Warned)]


def steps(address: Path | str) -> list[int]:
    """Of all folders, whole or not."""
    return sorted(step for name in Storage(str(address)).folders() if (step := step_of(name)) is not None)


class Watching(toys.Kept):
    """Does something after the loss of a step has been reported."""

    def __init__(self, do: Callable[[int], None]) -> None:
        super().__init__()
        self._do = do

    def event(self, event: AnyEvent) -> None:
        super().event(event)
        if isinstance(event, Metrics):
            self._do(event.step)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system can't be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_run_whose_weights_are_lost_fails_and_can_be_continued(
    command: Callable[..., Any], empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ("lab.yaml", "--train-only", "parallel.launcher=inprocess", f"tracking.directory={tmp_path}")
    tracking = ("tracking.log_model=false", f"tracking.uri={copied(empty_store, tmp_path).uri}")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, written_here():
        patch.setattr(AsyncCheckpointWriter, "_write", full)
        patch.setattr(shutil, "copyfile", full)
        ended = command("run", *here, *tracking)
    assert ended.code == 3, ended.stderr
    assert "No checkpoint was saved, but the training ended at step" in ended.stdout
    assert "No space left on device" in ended.stdout
    assert "the trained weights are lost; neither model/weights.pt nor a checkpoint of the last step" in ended.stderr

    with written_here():
        again = command("run", *here, *tracking, "--resume")
    assert again.code == 0, again.stderr
    assert "could be saved" not in again.stdout + again.stderr
    assert list(tmp_path.glob("*/model/weights.pt"))


def test_a_full_disk_is_told_and_training_goes_on(small: Path) -> None:
    filler = small / "filler"
    filler.write_bytes(b"x" * (2**20 - 2**14))
    injected("fills")

    def make_room(step: int) -> None:
        if step == 9:
            filler.unlink(missing_ok=True)

    outbox = Watching(make_room)
    run(
        small / "checkpoints", outbox=outbox, train={"epochs": 5},
        model={"_target_": "toys.wide_net"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 1e-4}, checkpoint={"keep": 1},
    )  # fmt: skip

    assert len(outbox.series("train/loss")) == 15
    first, second = warnings(outbox)
    assert "step-00000003 could not be saved" in first
    assert "can be saved again" in second
    assert steps(small / "checkpoints") == [15]
