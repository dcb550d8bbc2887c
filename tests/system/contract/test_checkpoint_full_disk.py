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
from checkpointed import run, steps
from recordings import copied, written_here

from pipeline.train.checkpoint import Writer


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
        patch.setattr(Writer, "_write", full)
        patch.setattr(shutil, "copyfileobj", full)
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

    outbox = run(
        small / "checkpoints", outbox=toys.Kept(lambda step: filler.unlink(missing_ok=True) if step == 9 else None),
        model={"_target_": "toys.wide_net"}, optimizer={"_target_": "torch.optim.SGD", "lr": 1e-4},
        train={"epochs": 5}, checkpoint={"keep": 1},
    )  # fmt: skip

    assert len(outbox.series("train/loss")) == 15
    first, second = outbox.warnings
    assert f"step-00000003 could not be saved in {small}/checkpoints: No space left on device." in first
    assert "can be saved again" in second
    assert steps(small / "checkpoints") == [15]
