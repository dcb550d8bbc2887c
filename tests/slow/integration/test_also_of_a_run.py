"""A run with trackers beside MLflow: TensorBoard, W&B offline, and one that fails, written by the process beside it."""

# promise: `tracking.loggers` through the command, W&B offline, and one that fails

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.protocol.events import Metrics
from pipeline.record import journal

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine importing MLflow alone takes longer than a user would wait."""
    monkeypatch.setattr("pipeline.tracking.follower._DRAIN_SECONDS", 200.0)


def run(command: Command, folder: Path, also: str, *more: str) -> tuple[Path, Any]:
    """A run of lab.yaml with its folder."""
    ended = command(
        "run", "lab.yaml", "--train-only", f"tracking.loggers={also}", f"tracking.directory={folder}/runs",
        f"tracking.uri=sqlite:///{folder}/mlflow.db", *more,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    (made,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
    return made, ended


def losses(folder: Path) -> list[tuple[int, float]]:
    """The losses of the journal."""
    events = [event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Metrics)]
    return [(p.step, p.value) for event in events for p in event.points if p.name == "train/loss"]


def test_tensorboard_has_the_losses_of_a_run_and_of_its_continuation(command: Command, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for more in ((), ("--resume", "train.epochs=3")):
        folder, ended = run(command, tmp_path, "[tensorboard]", *more)
        read = reader.EventAccumulator(str(folder / "tensorboard" / "main"), size_guidance={"scalars": 0})
        read.Reload()
        expected = losses(folder)
        assert [point.step for point in read.Scalars("train/loss")] == [step for step, _ in expected]
        assert all(
            math.isclose(point.value, value, rel_tol=1e-6)  # TensorBoard keeps 32 bits
            for point, (_, value) in zip(read.Scalars("train/loss"), expected, strict=True)
        )
        assert f"tensorboard --logdir {folder / 'tensorboard'}" in ended.stdout


def test_wandb_offline_keeps_the_run_in_its_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for more in (("tracking.tags={team: vision}",), ("--resume", "train.epochs=3", "tracking.tags={team: vision}")):
        folder, ended = run(command, tmp_path, "[wandb]", *more)
        (kept,) = folder.glob("wandb/offline-run-*")  # one that is continued is written again as a whole
        assert f"wandb    wandb sync {kept}" in ended.stdout
        records = list(read_offline(kept))
        rows = [row for kind, row in records if kind == "history"]
        assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == losses(folder)
        *_, described = (found for kind, found in records if kind == "run")
        assert described["config"]["train"]["global_batch_size"] == 16
        assert described["tags"] == ["team:vision"]
        assert [code for kind, code in records if kind == "exit"] == [0]


def read_offline(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read the records of a W&B run that was kept offline, with W&B's own types."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("run-*.wandb")
    for data in logged(file.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            yield kind, {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
        elif kind == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            yield kind, {"config": config, "tags": list(record.run.tags)}
        elif kind == "exit":
            yield kind, record.exit.exit_code


def logged(content: bytes, *, header: int = 7, block: int = 2**15) -> Iterator[bytes]:
    """Split a log in LevelDB's format after W&B's header: blocks of parts with checksum, length and kind."""
    at, whole = header, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block has no room for a part
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or the last of its parts
            yield whole
            whole = b""


def test_one_that_fails_leaves_the_run_and_the_others_alone(
    command: Command, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package in place of W&B's, which raises, as without a network."""
    (tmp_path / "wandb.py").write_text("raise OSError('no route to https://me:pa55@api.wandb.ai')\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder, ended = run(command, tmp_path, "[wandb, tensorboard]")
    said = " ".join(ended.output.split())
    assert said.count("wandb raised OSError: no route to https://") == 1
    assert f"It gets no further events. Send the rest with: pipeline sync {folder}" in said
    assert "pa55" not in ended.output
    assert list((folder / "tensorboard" / "main").iterdir())
    assert json.loads((folder / "sync.json").read_text())["delivered"]
