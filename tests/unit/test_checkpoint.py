"""Checkpoints on real file systems: whole or not taken for whole, kept as asked, never in training's way."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
import toys
from census import injected
from checkpointed import EVERY, STEPS, Saving, run, steps
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from pipeline.errors import ExperimentError, TrainingError, UsageError
from pipeline.protocol.events import CheckpointSaved, Metrics
from pipeline.train import checkpoint, meter
from pipeline.train.manifest import FILE_NAME, StoredFile, entries, folder_name, trained, verify
from pipeline.train.saved_state import STATE
from pipeline.train.storage import Storage, address_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saving]:
    """A training with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("original")
    return folder, run(folder, **EVERY)


@pytest.fixture
def copy(original: tuple[Path, Saving], tmp_path: Path) -> Path:
    """The checkpoints of its first five steps, to be damaged."""
    shutil.copytree(original[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / folder_name(STEPS))
    return tmp_path / "copy"


@pytest.fixture
def each_step_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the short steps of a toy."""
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)


class TestWhen:
    @pytest.mark.usefixtures("each_step_reported")
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
    def test_at_the_end_of_epoch_and_run_and_as_often_as_asked(
        self, tmp_path: Path, options: dict[str, Any], expected: list[int]
    ) -> None:
        assert run(tmp_path, checkpoint=options).saved == expected

    def test_all_steps_are_reported_before(self, original: tuple[Path, Saving]) -> None:
        """A crash right behind a checkpoint loses no step's loss."""
        reported = 0
        for event in original[1].events:
            if isinstance(event, Metrics):
                reported = max([reported, *(p.step for p in event.points if p.name == "train/loss")])
            elif isinstance(event, CheckpointSaved):
                assert event.step <= reported


class TestFiles:
    def test_lie_in_a_folder_for_each_step(self, original: tuple[Path, Saving]) -> None:
        folder, outbox = original
        assert steps(folder) == outbox.saved == list(range(1, STEPS + 1))
        for entry in entries(Storage(str(folder))):
            assert verify(Storage(str(folder)), entry) is None
            assert {path.name for path in (folder / entry.name).iterdir()} == {STATE, FILE_NAME}

    @pytest.mark.parametrize(("keep", "expected"), [(1, [6]), (3, [4, 5, 6])])
    def test_of_older_steps_go_once_newer_ones_are_whole(self, tmp_path: Path, keep: int, expected: list[int]) -> None:
        (tmp_path / folder_name(77)).mkdir()
        (tmp_path / folder_name(77) / STATE).write_bytes(b"half")
        (tmp_path / "notes").mkdir()
        run(tmp_path, checkpoint={"every_steps": 1, "keep": keep})
        assert (tmp_path / "notes").is_dir(), "not ours"
        assert steps(tmp_path) == expected

    @pytest.mark.parametrize(("mode", "kept"), [("auto", min), ("min", min), ("max", max)])
    def test_of_the_best_stay(self, tmp_path: Path, mode: str, kept: Callable[..., Any]) -> None:
        options = {"keep": 1, "best": "validation/loss", "mode": mode}
        outbox = run(
            tmp_path, checkpoint=options, train={"epochs": 5}, optimizer={"_target_": "torch.optim.SGD", "lr": 0.5}
        )
        losses = {point.step: point.value for point in outbox.points("validation/loss")}
        assert steps(tmp_path) == sorted({kept(losses, key=losses.__getitem__), 15})

    def test_what_is_trained_decides_what_is_the_same(self) -> None:
        first, second, *others = (
            trained(toys.experiment(**sections))
            for sections in (
                {}, {"parallel": {"workers": 2}, "checkpoint": {"keep": 3}},
                {"seed": 4}, {"train": {"epochs": 3}}, {"model": {"_target_": "a.b"}},
            )
        )  # fmt: skip
        assert first == second
        assert all(one not in (first, *others[:n]) for n, one in enumerate(others))


def _flip(folder: Path) -> None:
    content = bytearray((folder / STATE).read_bytes())
    content[-200] ^= 1
    (folder / STATE).write_bytes(content)


def _truncate(folder: Path) -> None:
    os.truncate(folder / STATE, (folder / STATE).stat().st_size - 1)


def _edit(folder: Path) -> None:
    manifest = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps({**manifest, "epoch": 0}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "bytes instead of"),
    "flipped": (_flip, "the checksum of state.pt has changed"),
    "a file is missing": (lambda folder: (folder / STATE).unlink(), "state.pt is missing"),
    "no manifest": (lambda folder: (folder / FILE_NAME).unlink(), "no valid manifest"),
    "half a manifest": (lambda folder: os.truncate(folder / FILE_NAME, 200), "no valid manifest"),
    "an edited manifest": (_edit, "no valid manifest"),
    "nothing in it": (lambda folder: [path.unlink() for path in folder.iterdir()], "no valid manifest"),
}


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_in_the_newest_leads_to_the_one_before(self, copy: Path, original: tuple[Path, Saving], kind: str) -> None:
        damage, message = DAMAGE[kind]
        damage(copy / folder_name(5))
        injected("corruptions")
        outbox = run(copy, resume=True, **EVERY)

        assert outbox.resumed == [4]
        (warning,) = outbox.warnings
        assert message in warning
        assert str(copy / folder_name(5)) in warning
        assert outbox.after(4) == original[1].after(4)
        assert verify(Storage(str(copy)), entries(Storage(str(copy)))[1]) is None, "5 is whole again"

    def test_in_all_leads_to_the_beginning(self, copy: Path, original: tuple[Path, Saving]) -> None:
        for folder in copy.iterdir():
            _truncate(folder)
        outbox = run(copy, resume=True, **EVERY)

        assert outbox.resumed == []
        *damaged, last = outbox.warnings
        assert (len(damaged), last) == (5, f"no complete checkpoint in {copy}. Training starts from step 0.")
        assert outbox.series("train/loss") == original[1].series("train/loss")

    def test_of_another_format_is_refused(self, copy: Path) -> None:
        manifest = entries(Storage(str(copy)))[0].manifest
        assert manifest is not None
        other = manifest.model_copy(update={"format": 1}).sealed().model_dump_json()
        (copy / folder_name(5) / FILE_NAME).write_text(other)
        with pytest.raises(UsageError, match="step 5: this checkpoint has format 1, and this version"):
            run(copy, resume=True)

    def test_code_is_never_executed_though_the_manifest_is_right(self, copy: Path, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "executed",)

        state, manifest = copy / folder_name(5) / STATE, entries(Storage(str(copy)))[0].manifest
        torch.save({"model": Evil()}, state)
        torch.load(state, weights_only=False)
        (tmp_path / "executed").unlink()  # so it would have been
        assert manifest is not None
        forged = manifest.model_copy(update={"files": (StoredFile.of(state),)}).sealed()
        (copy / folder_name(5) / FILE_NAME).write_text(forged.model_dump_json())
        with pytest.raises(TrainingError, match=r"can't be read: UnpicklingError"):
            run(copy, resume=True)
        assert not (tmp_path / "executed").exists()


class Gated(MemoryFileSystem):
    """Takes files only while its gate is open."""

    protocol = "gated"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    gate = threading.Event()
    broken: frozenset[str] = frozenset()
    """Names of folders that it doesn't take."""

    def put_file(self, lpath: str, rpath: str, *args: Any, **more: Any) -> None:
        assert self.gate.wait(timeout=60)
        if not self.broken.isdisjoint(rpath.split("/")):
            raise ConnectionError("the storage doesn't answer")
        super().put_file(lpath, rpath, *args, **more)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("gated://", "memory://")))


class GatedAt(NamedTuple):
    address: str
    kind: type[Gated]


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedAt]:
    fsspec.register_implementation("gated", Gated, clobber=True)
    Gated.gate.set()
    yield GatedAt(f"gated://{tmp_path.name}", Gated)
    Gated.broken = frozenset()
    Gated.store.clear()


class TestStorage:
    def test_may_be_anything_that_fsspec_knows(self, original: tuple[Path, Saving], tmp_path: Path) -> None:
        address = f"memory://{tmp_path.name}"
        run(address, **EVERY)
        storage = Storage(address)
        storage.write(f"{folder_name(6)}/{STATE}", b"{}")
        damaged, whole, *_ = (verify(storage, entry) for entry in entries(storage))
        outbox = run(address, resume=True, **EVERY)

        assert damaged is not None
        assert damaged.startswith(f"{STATE} has 2 bytes instead of")
        assert whole is None
        assert outbox.resumed == [5]
        assert outbox.after(5) == original[1].after(5)

    def test_that_hangs_doesnt_stop_training(self, gated: GatedAt, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps are trained and reported, what is due meanwhile is left out, except for the end, which waits."""
        monkeypatch.setattr(checkpoint, "_PATIENCE_S", 0.05)
        gated.kind.gate.clear()
        outbox = run(
            gated.address, outbox=Saving(lambda step: gated.kind.gate.set() if step == STEPS else None), **EVERY
        )
        (warning,) = outbox.warnings
        assert warning.startswith(f"skipped checkpoint {folder_name(2)} because the previous checkpoint is still")
        assert outbox.saved == steps(gated.address) == [1, STEPS]
        kinds = [event.kind for event in outbox.events if isinstance(event, Metrics | CheckpointSaved)]
        assert kinds.index("checkpoint_saved") > 1

    def test_that_breaks_is_told_once_and_training_goes_on(self, gated: GatedAt) -> None:
        gated.kind.broken = frozenset({folder_name(2), folder_name(3)})
        outbox = run(gated.address, **EVERY)

        assert len(outbox.series("train/loss")) == STEPS
        first, second = outbox.warnings
        assert "could not be saved" in first
        assert "the storage doesn't answer" in first
        assert f"can be saved again. {folder_name(4)}" in second
        assert steps(gated.address) == outbox.saved == [1, 4, 5, 6], "nothing half-written is left"

    @pytest.mark.parametrize(
        ("broken", "options", "expected"),
        [
            ((5, 6), {}, (4, 2)),
            ((3,), {}, None),
            ((3,), {"best": "validation/loss"}, (6, 1)),
        ],
        ids=["the last", "an older one", "perhaps the best"],
    )
    def test_that_breaks_before_the_end_is_in_the_result(
        self, gated: GatedAt, broken: tuple[int, ...], options: dict[str, Any], expected: tuple[int, int] | None
    ) -> None:
        gated.kind.broken = frozenset(map(folder_name, broken))
        unsaved = run(gated.address, checkpoint={**EVERY["checkpoint"], **options}).result.unsaved
        assert (None if unsaved is None else (unsaved.newest, unsaved.failed)) == expected
        assert unsaved is None or "the storage doesn't answer" in unsaved.reason

    def test_that_cannot_be_read_stops_a_resume(self, copy: Path) -> None:
        (copy / folder_name(5) / FILE_NAME).unlink()
        (copy / folder_name(5) / FILE_NAME).mkdir()
        with pytest.raises(TrainingError, match=r"can't be read: IsADirectoryError.*Resume when"):
            run(copy, resume=True)

    def test_without_its_package_is_told_before_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "s3fs", None)  # an import fails
        monkeypatch.delitem(_registry, "s3", raising=False)
        for address, message in (
            ("s3://bucket/x", r"s3://bucket/x needs a package: Install s3fs to access S3 \(on every node\)"),
            ("gs://bucket/x", "gs://bucket/x needs a package: Please install gcsfs"),
            ("s4://bucket/x", "Protocol not known: s4"),
        ):
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
