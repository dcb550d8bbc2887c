"""Checkpoints on real file systems: whole or not taken for whole, kept as asked, never in training's way."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import toys
from checkpointed import EVERY, STEPS, run, steps, until
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from pipeline.errors import ExperimentError, TrainingError, UsageError
from pipeline.protocol.events import CheckpointSaved, Metrics
from pipeline.train import checkpoint, meter
from pipeline.train.saved_state import STATE
from pipeline.train.storage import (
    FILE_NAME,
    Manifest,
    Storage,
    StoredFile,
    address_of,
    dump_trained,
    entries,
    folder_name,
    verify,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, toys.Kept]:
    """A training with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("original")
    return folder, run(folder, **EVERY)


@pytest.fixture
def copy(original: tuple[Path, toys.Kept], tmp_path: Path) -> Path:
    """The checkpoints of its first five steps, to be damaged."""
    return until(5, folder=original[0], to=tmp_path / "copy")


def newest(address: Path | str) -> Manifest:
    manifest = entries(Storage(str(address)))[0].manifest
    assert manifest is not None
    return manifest


# When, and which stay


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 6]),
        ({"every_steps": 2}, [2, 3, 4, 6]),
        ({"every_minutes": 1e-9}, [1, 2, 3, 4, 5, 6]),
        ({"every_minutes": 1e3}, [3, 6]),
        ({"every_steps": 1, "keep": 0}, []),
    ],
)
def test_they_come_at_the_end_of_epoch_and_run_and_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[int]
) -> None:
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)  # also the short steps of a toy are reported
    assert run(tmp_path, checkpoint=options).saved == expected


def test_all_steps_are_reported_before(original: tuple[Path, toys.Kept]) -> None:
    """A crash right behind a checkpoint loses no step's loss."""
    reported = 0
    for event in original[1].events:
        if isinstance(event, Metrics):
            reported = max([reported, *(p.step for p in event.points if p.name == "train/loss")])
        elif isinstance(event, CheckpointSaved):
            assert event.step <= reported


def test_they_lie_in_a_folder_for_each_step(original: tuple[Path, toys.Kept]) -> None:
    folder, outbox = original
    assert steps(folder) == outbox.saved == list(range(1, STEPS + 1))
    for entry in entries(Storage(str(folder))):
        assert verify(Storage(str(folder)), entry) is None
        assert {path.name for path in (folder / entry.name).iterdir()} == {STATE, FILE_NAME}


@pytest.mark.parametrize(("keep", "expected"), [(1, [6]), (3, [4, 5, 6])])
def test_older_ones_go_once_newer_ones_are_whole(tmp_path: Path, keep: int, expected: list[int]) -> None:
    (tmp_path / folder_name(77)).mkdir()
    (tmp_path / folder_name(77) / STATE).write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    run(tmp_path, checkpoint={"every_steps": 1, "keep": keep})
    assert (tmp_path / "notes").is_dir(), "not ours"
    assert steps(tmp_path) == expected


@pytest.mark.parametrize(("mode", "kept"), [("auto", min), ("min", min), ("max", max)])
def test_the_best_stay(tmp_path: Path, mode: str, kept: Callable[..., Any]) -> None:
    options, sgd = {"keep": 1, "best": "validation/loss", "mode": mode}, {"_target_": "torch.optim.SGD", "lr": 0.5}
    outbox = run(tmp_path, checkpoint=options, train={"epochs": 5}, optimizer=sgd)
    losses = {point.step: point.value for point in outbox.points("validation/loss")}
    assert steps(tmp_path) == sorted({kept(losses, key=losses.__getitem__), 15})


def test_what_is_trained_decides_what_is_the_same() -> None:
    first, second, *others = (
        dump_trained(toys.experiment(**sections))
        for sections in (
            {}, {"parallel": {"workers": 2}, "checkpoint": {"keep": 3}},
            {"seed": 4}, {"train": {"epochs": 3}}, {"model": {"_target_": "a.b"}},
        )
    )  # fmt: skip
    assert first == second
    assert all(one not in (first, *others[:n]) for n, one in enumerate(others))


# Damage


def _flip(folder: Path) -> None:
    content = bytearray((folder / STATE).read_bytes())
    content[-200] ^= 1
    (folder / STATE).write_bytes(content)


def _edit(folder: Path) -> None:
    manifest = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps({**manifest, "epoch": 0}))


def _truncate(folder: Path) -> None:
    os.truncate(folder / STATE, (folder / STATE).stat().st_size - 1)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "bytes instead of"),
    "flipped": (_flip, "the checksum of state.pt has changed"),
    "a file is missing": (lambda folder: (folder / STATE).unlink(), "state.pt is missing"),
    "no manifest": (lambda folder: (folder / FILE_NAME).unlink(), "no valid manifest"),
    "half a manifest": (lambda folder: os.truncate(folder / FILE_NAME, 200), "no valid manifest"),
    "an edited manifest": (_edit, "no valid manifest"),
    "nothing in it": (lambda folder: [path.unlink() for path in folder.iterdir()], "no valid manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_in_the_newest_leads_to_the_one_before(copy: Path, original: tuple[Path, toys.Kept], kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(copy / folder_name(5))
    outbox = run(copy, resume=True, **EVERY)
    assert outbox.resumed == [4]
    (warning,) = outbox.warnings
    assert message in warning
    assert str(copy / folder_name(5)) in warning
    assert outbox.after(4) == original[1].after(4)
    assert verify(Storage(str(copy)), entries(Storage(str(copy)))[1]) is None, "5 is whole again"


def test_damage_in_all_leads_to_the_beginning(copy: Path, original: tuple[Path, toys.Kept]) -> None:
    for folder in copy.iterdir():
        _truncate(folder)
    outbox = run(copy, resume=True, **EVERY)
    assert outbox.resumed == []
    *damaged, last = outbox.warnings
    assert (len(damaged), last) == (5, f"no complete checkpoint in {copy}. Training starts from step 0.")
    assert outbox.series("train/loss") == original[1].series("train/loss")


def test_another_format_is_refused(copy: Path) -> None:
    other = newest(copy).model_copy(update={"format": 1}).seal().model_dump_json()
    (copy / folder_name(5) / FILE_NAME).write_text(other)
    with pytest.raises(UsageError, match="step 5: this checkpoint has format 1, and this version"):
        run(copy, resume=True)


def test_code_is_never_executed_though_the_manifest_is_right(copy: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    state = copy / folder_name(5) / STATE
    torch.save({"model": Evil()}, state)
    torch.load(state, weights_only=False)
    (tmp_path / "executed").unlink()  # so it would have been
    forged = newest(copy).model_copy(update={"files": (StoredFile.describe(state),)}).seal()
    (copy / folder_name(5) / FILE_NAME).write_text(forged.model_dump_json())
    with pytest.raises(TrainingError, match=r"can't be read: UnpicklingError"):
        run(copy, resume=True)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_counts_once_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest gets its name last, when its content and the names of all files have been written to the disk."""
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        assert synced[-1:] == [f".{FILE_NAME}.partial"] or not (tmp_path / folder_name(3) / FILE_NAME).exists()
        synced.append(path.name)

    monkeypatch.setattr(os, "fsync", fsync)
    run(tmp_path, train={"epochs": 1})
    assert synced == [STATE, folder_name(3), tmp_path.name, f".{FILE_NAME}.partial", folder_name(3)]


# Storage


class Gated(MemoryFileSystem):
    """Takes files only while its gate is open."""

    protocol = "gated"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    gate = threading.Event()
    broken: frozenset[str] = frozenset()  # Names of folders that it doesn't take

    def put_file(self, lpath: str, rpath: str, *args: Any, **more: Any) -> None:
        assert self.gate.wait(timeout=60)
        if not self.broken.isdisjoint(rpath.split("/")):
            raise ConnectionError("the storage doesn't answer")
        super().put_file(lpath, rpath, *args, **more)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("gated://", "memory://")))


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[str]:
    """The address of such a storage."""
    fsspec.register_implementation("gated", Gated, clobber=True)
    Gated.gate.set()
    yield f"gated://{tmp_path.name}"
    Gated.broken = frozenset()
    Gated.store.clear()


class TestStorage:
    def test_may_be_anything_that_fsspec_knows(self, original: tuple[Path, toys.Kept], tmp_path: Path) -> None:
        address = f"memory://{tmp_path.name}"
        run(address, **EVERY)
        storage = Storage(address)
        storage.write(f"{folder_name(6)}/{STATE}", b"{}")
        damaged, whole, *_ = (verify(storage, entry) for entry in entries(storage))
        outbox = run(address, resume=True, **EVERY)
        assert str(damaged).startswith(f"{STATE} has 2 bytes instead of")
        assert whole is None
        assert outbox.resumed == [5]
        assert outbox.after(5) == original[1].after(5)

    def test_that_hangs_doesnt_stop_training(self, gated: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps are trained and reported, what is due meanwhile is left out, except for the end, which waits."""
        monkeypatch.setattr(checkpoint, "_PATIENCE_S", 0.05)
        Gated.gate.clear()
        outbox = run(gated, outbox=toys.Kept(lambda step: Gated.gate.set() if step == STEPS else None), **EVERY)
        (warning,) = outbox.warnings
        assert warning.startswith(f"skipped checkpoint {folder_name(2)} because the previous checkpoint is still")
        assert outbox.saved == steps(gated) == [1, STEPS]
        kinds = [event.kind for event in outbox.events if isinstance(event, Metrics | CheckpointSaved)]
        assert kinds.index("checkpoint_saved") > 1

    @pytest.mark.parametrize(
        ("broken", "options", "expected"),
        [((2, 3), {}, None), ((5, 6), {}, (4, 2)), ((3,), {"best": "validation/loss"}, (6, 1))],
        ids=["older ones", "the last", "perhaps the best"],
    )
    def test_that_breaks_is_told_once_and_in_the_result_and_training_goes_on(
        self, gated: str, broken: tuple[int, ...], options: dict[str, Any], expected: tuple[int, int] | None
    ) -> None:
        Gated.broken = frozenset(map(folder_name, broken))
        outbox = run(gated, checkpoint={**EVERY["checkpoint"], **options})
        assert len(outbox.series("train/loss")) == STEPS
        first, *others = outbox.warnings
        assert "could not be saved" in first
        assert "the storage doesn't answer" in first
        assert all(f"can be saved again. {folder_name(max(broken) + 1)}" in one for one in others[:1])
        assert steps(gated) == outbox.saved == [n for n in range(1, 7) if n not in broken], "nothing half-written"
        unsaved = outbox.result.unsaved
        assert (None if unsaved is None else (unsaved.newest, unsaved.failed)) == expected
        assert unsaved is None or "the storage doesn't answer" in unsaved.reason

    def test_that_cannot_be_read_stops_a_resume(self, copy: Path) -> None:
        (copy / folder_name(5) / FILE_NAME).unlink()
        (copy / folder_name(5) / FILE_NAME).mkdir()
        with pytest.raises(TrainingError, match=r"can't be read: IsADirectoryError.*Resume when"):
            run(copy, resume=True)

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("s3://bucket/x", r"s3://bucket/x needs a package: Install s3fs to access S3 \(on every node\)"),
            ("gs://bucket/x", "gs://bucket/x needs a package: Please install gcsfs"),
            ("s4://bucket/x", "Protocol not known: s4"),
        ],
    )
    def test_without_its_package_is_told_before_training(
        self, monkeypatch: pytest.MonkeyPatch, address: str, message: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "s3fs", None)  # an import fails
        monkeypatch.delitem(_registry, "s3", raising=False)
        with pytest.raises(ExperimentError, match=message):
            Storage(address)

    def test_with_a_password_is_refused_and_not_repeated(self) -> None:
        with pytest.raises(ExperimentError, match="password in the environment") as error:
            Storage("s3://me:sesame@bucket/x")
        assert "sesame" not in str(error.value)

    def test_has_a_folder_for_each_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        run = Path("runs/r1")
        assert address_of(None, run=run) == str(tmp_path / "runs" / "r1" / "checkpoints")
        assert address_of("here", run=run) == str(tmp_path / "here" / "r1")
        assert address_of("s3://bucket/x/", run=run) == "s3://bucket/x/r1"
