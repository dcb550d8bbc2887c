"""Checkpoints on real file systems: whole or not taken for whole, kept as asked, never in training's way."""

import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import toys
from census import injected
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from torch.distributed.checkpoint import HuggingFaceStorageReader

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.events import AnyEvent, CheckpointSaved, Metrics, Resumed, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.checkpoints import manager as manager
from pipeline.training.checkpoints.manifest import (
    FILE_NAME,
    entries,
    folder_name,
    step_of,
    trained,
    verify,
)
from pipeline.training.checkpoints.storage import Storage, address_of
from pipeline.training.loop import train
from pipeline.training.meters import meter

TENSORS, VALUES = "state.safetensors", "values.json"
STEPS = 6
"""Of a toy training: two epochs of three steps."""


def trial(address: Path | str, *, resume: bool = False, **sections: Any) -> Trial:
    update = {"checkpoints": str(address), "resume": resume}
    return toys.trial(**sections).model_copy(update=update)


def run(address: Path | str, *, resume: bool = False, outbox: toys.Kept | None = None, **sections: Any) -> toys.Kept:
    outbox = outbox or toys.Kept()
    train(trial(address, resume=resume, **sections), rank=Rank(), outbox=outbox)
    return outbox


def warnings(outbox: toys.Kept) -> list[str]:
    return [event.message for event in outbox.events if isinstance(event, Warned)]


def saved(outbox: toys.Kept) -> list[int]:
    return [event.step for event in outbox.events if isinstance(event, CheckpointSaved)]


def resumed(outbox: toys.Kept) -> list[int]:
    return [event.step for event in outbox.events if isinstance(event, Resumed)]


def losses_after(step: int, outbox: toys.Kept) -> list[Any]:
    """A resumed training also repeats some from before it."""
    return [point for point in outbox.points("train/loss") if point.step > step]


def steps(address: Path | str) -> list[int]:
    """Of all folders, whole or not."""
    return sorted(step for name in Storage(str(address)).folders() if (step := step_of(name)) is not None)


EVERY: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": 100}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, toys.Kept]:
    """A training with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("original")
    return folder, run(folder, **EVERY)


@pytest.fixture
def copy(original: tuple[Path, toys.Kept], tmp_path: Path) -> Path:
    """The checkpoints of its first five steps, to be damaged."""
    shutil.copytree(original[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / folder_name(STEPS))
    return tmp_path / "copy"


@pytest.fixture
def each_step_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the short steps of a toy."""
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)


class TestWhen:
    def test_at_the_end_of_epoch_and_run(self, tmp_path: Path) -> None:
        assert saved(run(tmp_path)) == [3, 6]

    def test_every_so_many_steps_besides(self, tmp_path: Path) -> None:
        assert saved(run(tmp_path, checkpoint={"every_steps": 2})) == [2, 3, 4, 6]

    @pytest.mark.usefixtures("each_step_reported")
    def test_every_so_many_minutes_when_metrics_are_reported(self, tmp_path: Path) -> None:
        often = run(tmp_path / "a", checkpoint={"every_minutes": 1e-9})
        seldom = run(tmp_path / "b", checkpoint={"every_minutes": 1e3})

        assert (saved(often), saved(seldom)) == ([1, 2, 3, 4, 5, 6], [3, 6])

    def test_not_in_a_measurement(self, tmp_path: Path) -> None:
        outbox = toys.Kept()
        train(toys.trial(max_steps=4, **EVERY), rank=Rank(), outbox=outbox)

        assert saved(outbox) == []
        assert list(tmp_path.iterdir()) == []

    def test_not_if_none_are_kept(self, tmp_path: Path) -> None:
        assert saved(run(tmp_path, checkpoint={"every_steps": 1, "keep": 0})) == []

    def test_all_steps_are_reported_before(self, original: tuple[Path, toys.Kept]) -> None:
        """A crash right behind a checkpoint loses no step's loss."""
        reported = 0
        for event in original[1].events:
            if isinstance(event, Metrics):
                reported = max([reported, *(p.step for p in event.points if p.name == "train/loss")])
            elif isinstance(event, CheckpointSaved):
                assert event.step <= reported


class TestFiles:
    def test_lie_in_a_folder_for_each_step(self, original: tuple[Path, toys.Kept]) -> None:
        folder, outbox = original

        assert steps(folder) == saved(outbox) == list(range(1, STEPS + 1))
        for entry in entries(Storage(str(folder))):
            assert verify(Storage(str(folder)), entry) is None
            assert {path.name for path in (folder / entry.name).iterdir()} == {TENSORS, VALUES, FILE_NAME}

    def test_are_read_by_torch_distributed_checkpoint(self, original: tuple[Path, toys.Kept]) -> None:
        metadata = HuggingFaceStorageReader(str(original[0] / folder_name(STEPS))).read_metadata()

        assert {"model/weight", "model/bias"} <= metadata.state_dict_metadata.keys()

    def test_say_what_they_are(self, original: tuple[Path, toys.Kept]) -> None:
        newest = entries(Storage(str(original[0])))[0].manifest

        assert newest is not None
        assert (newest.step, newest.epoch, newest.steps_per_epoch, newest.world_size) == (6, 2, 3, 1)
        assert newest.experiment["optimizer"] == {"_target_": "torch.optim.SGD", "lr": 0.05, "groups": []}
        assert newest.versions["torch"] == version("torch")

    def test_of_older_steps_go_once_newer_ones_are_whole(self, tmp_path: Path) -> None:
        run(tmp_path / "one", checkpoint={"every_steps": 1, "keep": 1})
        run(tmp_path / "three", checkpoint={"every_steps": 1, "keep": 3})

        assert (steps(tmp_path / "one"), steps(tmp_path / "three")) == ([6], [4, 5, 6])

    @pytest.mark.parametrize(("mode", "kept"), [("auto", min), ("min", min), ("max", max)])
    def test_of_the_best_stay(self, tmp_path: Path, mode: str, kept: Callable[..., Any]) -> None:
        options = {"keep": 1, "best": "validation/loss", "mode": mode}
        outbox = run(
            tmp_path, checkpoint=options, train={"epochs": 5}, optimizer={"_target_": "torch.optim.SGD", "lr": 0.5}
        )
        losses = {point.step: point.value for point in outbox.points("validation/loss")}

        assert steps(tmp_path) == sorted({kept(losses, key=losses.__getitem__), 15})

    def test_what_is_trained_decides_what_is_the_same(self) -> None:
        same = [toys.experiment(), toys.experiment(parallel={"workers": 2}, checkpoint={"keep": 3})]
        other = [
            toys.experiment(seed=4),
            toys.experiment(train={"epochs": 3}),
            toys.experiment(model={"_target_": "a.b"}),
        ]
        first, second, *others = [trained(one) for one in [*same, *other]]

        assert first == second
        assert all(one not in (first, *others[:n]) for n, one in enumerate(others))


def _truncate(folder: Path) -> None:
    os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size - 1)


def _flip(name: str, *, at: int) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return flip


def _change_step(folder: Path) -> None:
    manifest = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps({**manifest, "epoch": 0}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, "bytes instead of"),
    "flipped in the tensors": (_flip(TENSORS, at=-3), "the checksum of state.safetensors has changed"),
    "flipped in the values": (_flip(VALUES, at=20), "the checksum of values.json has changed"),
    "a file is missing": (lambda folder: (folder / TENSORS).unlink(), "state.safetensors is missing"),
    "no manifest": (lambda folder: (folder / FILE_NAME).unlink(), "no valid manifest"),
    "half a manifest": (lambda folder: os.truncate(folder / FILE_NAME, 200), "no valid manifest"),
    "an edited manifest": (_change_step, "no valid manifest"),
    "nothing in it": (lambda folder: [path.unlink() for path in folder.iterdir()] and None, "no valid manifest"),
}  # fmt: skip


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_in_the_newest_leads_to_the_one_before(
        self, copy: Path, original: tuple[Path, toys.Kept], kind: str
    ) -> None:
        damage, message = DAMAGE[kind]
        damage(copy / folder_name(5))
        injected("corruptions")
        outbox = run(copy, resume=True, **EVERY)

        assert resumed(outbox) == [4]
        (warning,) = warnings(outbox)
        assert message in warning
        assert str(copy / folder_name(5)) in warning
        assert losses_after(4, outbox) == losses_after(4, original[1])
        assert verify(Storage(str(copy)), entries(Storage(str(copy)))[1]) is None, "5 is whole again"

    def test_in_all_leads_to_the_beginning(self, copy: Path, original: tuple[Path, toys.Kept]) -> None:
        for folder in copy.iterdir():
            _truncate(folder)
        outbox = run(copy, resume=True, **EVERY)

        assert resumed(outbox) == []
        assert len(warnings(outbox)) == 6
        assert "starts from step 0" in warnings(outbox)[-1]
        assert outbox.series("train/loss") == original[1].series("train/loss")

    def test_no_checkpoint_leads_to_the_beginning(self, tmp_path: Path) -> None:
        outbox = run(tmp_path / "none", resume=True)

        assert [f"no complete checkpoint in {tmp_path / 'none'}. Training starts from step 0."] == warnings(outbox)

    def test_leftovers_go_with_the_next_whole_one(self, tmp_path: Path) -> None:
        (tmp_path / folder_name(77)).mkdir()
        (tmp_path / folder_name(77) / TENSORS).write_bytes(b"half")
        (tmp_path / "notes").mkdir()
        run(tmp_path)

        assert steps(tmp_path) == [3, 6]
        assert (tmp_path / "notes").is_dir(), "not ours"

    def test_a_pickle_is_never_loaded(self, copy: Path, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (tmp_path / "executed",)

        for name in (".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin"):
            (copy / folder_name(5) / name).write_bytes(pickle.dumps(Evil()))
        (copy / folder_name(4) / TENSORS).write_bytes(pickle.dumps(Evil()))
        assert resumed(run(copy, resume=True, **EVERY)) == [5]
        _truncate(copy / folder_name(6))
        _truncate(copy / folder_name(5))
        (copy / folder_name(4) / TENSORS).write_bytes(pickle.dumps(Evil()))
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


@pytest.fixture
def gated() -> Iterator[type[Gated]]:
    fsspec.register_implementation("gated", Gated, clobber=True)
    Gated.gate.set()
    yield Gated
    Gated.broken = frozenset()
    Gated.store.clear()


class Watching(toys.Kept):
    """Does something after the loss of a step has been reported."""

    def __init__(self, do: Callable[[int], None]) -> None:
        super().__init__()
        self._do = do

    def event(self, event: AnyEvent) -> None:
        super().event(event)
        if isinstance(event, Metrics):
            self._do(event.step)


class TestStorage:
    def test_may_be_anything_that_fsspec_knows(self, original: tuple[Path, toys.Kept], tmp_path: Path) -> None:
        address = f"memory://{tmp_path.name}"
        run(address, **EVERY)
        Storage(address).remove(folder_name(6))
        outbox = run(address, resume=True, **EVERY)

        assert resumed(outbox) == [5]
        assert losses_after(5, outbox) == losses_after(5, original[1])

    def test_is_verified_wherever_it_is(self, tmp_path: Path) -> None:
        address = f"memory://{tmp_path.name}"
        run(address)
        storage = Storage(address)
        storage.write(f"{folder_name(6)}/{VALUES}", b"{}")

        damaged, whole = (verify(storage, entry) for entry in entries(storage))
        assert damaged is not None
        assert damaged.startswith(f"{VALUES} has 2 bytes instead of")
        assert whole is None

    @pytest.mark.usefixtures("each_step_reported")
    def test_that_is_slow_doesnt_stop_training(self, gated: type[Gated], tmp_path: Path) -> None:
        """Two steps are trained and reported while the first checkpoint is on its way."""
        gated.gate.clear()
        outbox = Watching(lambda step: gated.gate.set() if step == 6 else None)
        run(
            f"gated://{tmp_path.name}", outbox=outbox, checkpoint={"every_steps": 4},
            train={"epochs": 1, "log_every_steps": 1, "global_batch_size": 3},
        )  # fmt: skip
        order = [(event.kind, event.step) for event in outbox.events if isinstance(event, Metrics | CheckpointSaved)]

        assert order.index(("metrics", 6)) < order.index(("checkpoint_saved", 4))
        assert saved(outbox) == [4, 8]

    def test_that_is_slow_is_no_part_of_the_throughput(self, gated: type[Gated], tmp_path: Path) -> None:
        """The second save waits for the first one, which takes a second; steps of a toy take a millisecond."""
        gated.gate.clear()
        opening = threading.Timer(1.0, gated.gate.set)
        opening.start()
        outbox = run(f"gated://{tmp_path.name}", **EVERY)
        blocked = [event.blocked_seconds for event in outbox.events if isinstance(event, CheckpointSaved)]
        opening.join()

        assert max(blocked) > 0.3
        assert max(outbox.series("time/step_ms")[1:]) < 300

    def test_that_breaks_is_told_once_and_training_goes_on(self, gated: type[Gated], tmp_path: Path) -> None:
        gated.broken = frozenset({folder_name(2), folder_name(3)})
        address = f"gated://{tmp_path.name}"
        outbox = run(address, **EVERY)

        assert len(outbox.series("train/loss")) == STEPS
        assert saved(outbox) == [1, 4, 5, 6]
        first, second = warnings(outbox)
        assert "could not be saved" in first
        assert "the storage doesn't answer" in first
        assert f"can be saved again. {folder_name(4)}" in second
        assert steps(address) == saved(outbox), "nothing half-written is left"

    def test_that_breaks_before_the_end_is_in_the_result(self, gated: type[Gated], tmp_path: Path) -> None:
        gated.broken = frozenset({folder_name(5), folder_name(6)})
        result = train(trial(f"gated://{tmp_path.name}", **EVERY), rank=Rank(), outbox=toys.Kept())
        assert result.unsaved is not None
        assert (result.unsaved.newest, result.unsaved.failed) == (4, 2)
        assert "the storage doesn't answer" in result.unsaved.reason

        gated.broken = frozenset({folder_name(3)})
        best = {"checkpoint": {**EVERY["checkpoint"], "best": "validation/loss"}}
        for sections, failed in ((EVERY, 0), (EVERY | best, 1)):
            address = f"gated://{tmp_path.name}-{failed}"
            unsaved = train(trial(address, **sections), rank=Rank(), outbox=toys.Kept()).unsaved
            assert (unsaved.failed if unsaved else 0) == failed, "only the best may be lost"

    def test_that_cannot_be_read_stops_a_resume(self, copy: Path) -> None:
        (copy / folder_name(5) / FILE_NAME).unlink()
        (copy / folder_name(5) / FILE_NAME).mkdir()
        with pytest.raises(TrainingError, match=r"can't be read: IsADirectoryError.*Resume when"):
            run(copy, resume=True)

    def test_needs_free_space_in_the_temporary_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        address = f"memory://{tmp_path.name}"
        run(address)

        def fill_after(checks: int) -> None:
            free = iter([10**9] * checks)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free, 10)))

        lack = f"the temporary folder {gettempdir()} has 0.0 MiB free, but {{}} needs 0.0 MiB. Set TMPDIR"
        fill_after(0)
        with pytest.raises(TrainingError, match=lack.format("a checkpoint")):
            run(f"{address}-full")
        fill_after(1)
        message, *_ = warnings(run(f"{address}-full"))
        assert message.startswith(f"step-00000003 could not be saved in {address}-full: {lack.format('step-00000003')}")
        fill_after(1)
        with pytest.raises(TrainingError, match=lack.format("step-00000006")):
            run(address, resume=True)

    def test_without_its_package_is_told_before_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "s3fs", None)  # an import fails
        monkeypatch.delitem(_registry, "s3", raising=False)
        needs = r"s3://bucket/x needs a package: Install s3fs to access S3 \(on every node\)"
        with pytest.raises(ExperimentError, match=needs):
            Storage("s3://bucket/x")
        with pytest.raises(ExperimentError, match=r"gs://bucket/x needs a package: Please install gcsfs"):
            Storage("gs://bucket/x")
        with pytest.raises(ExperimentError, match="Protocol not known: s4"):
            Storage("s4://bucket/x")

    def test_with_a_password_is_refused_and_not_repeated(self) -> None:
        with pytest.raises(ExperimentError, match="password in the environment") as error:
            Storage("s3://me:sesame@bucket/x")
        assert "sesame" not in str(error.value)

    def test_that_hangs_doesnt_stop_training(
        self, gated: type[Gated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is due meanwhile is left out, except for the end, which waits."""
        monkeypatch.setattr(manager, "_PATIENCE_S", 0.05)
        gated.gate.clear()
        outbox = Watching(lambda step: gated.gate.set() if step == STEPS else None)
        run(f"gated://{tmp_path.name}", outbox=outbox, **EVERY)

        assert saved(outbox) == [1, STEPS]
        (warning,) = warnings(outbox)
        assert warning.startswith(f"skipped checkpoint {folder_name(2)} because the previous checkpoint is still")
        assert steps(f"gated://{tmp_path.name}") == [1, STEPS]

    def test_has_a_folder_for_each_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        run = Path("runs/r1")

        assert address_of(None, run=run) == str(tmp_path / "runs" / "r1" / "checkpoints")
        assert address_of("here", run=run) == str(tmp_path / "here" / "r1")
        assert address_of("s3://bucket/x/", run=run) == "s3://bucket/x/r1"
