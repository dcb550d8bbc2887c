"""Rows of Ray Data in real trainings: which global batches they become, at any number of workers and after a resume."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import registry
from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.errors import ExperimentError
from pipeline.launchers._ray.dealing import Dealing
from pipeline.launchers._ray.ingest import Facts, Ingest, stream_of
from pipeline.launchers._ray.local import LocalRayRequest, started
from pipeline.launchers.base import Session
from pipeline.planning.plan import make_plan
from pipeline.planning.resources import Resources
from pipeline.protocol.events import Metrics, Resumed, Warned
from pipeline.recording.journal import journal
from pipeline.recording.journal.recorder import Recorder
from pipeline.recording.recorded_run import open_trial
from pipeline.training.batches.order import StreamOrder
from pipeline.training.batches.stream import StreamLoader

FILES, HELD_OUT = [296, 160, 248, 72, 113], [7, 10]
"""Rows in each file: 889 to train on, in global batches of 24, of which the last of an epoch has 1."""
BATCH, STEPS_PER_EPOCH, EPOCHS, LR = 24, 38, 2, 0.05
TOLERANCE = 1e-12

YAML = """
name: streamed
seed: 3
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data:
  _target_: pipeline.data.streamed
  train: {_target_: ray.data.read_parquet, paths: PATH/train}
  validation: {_target_: ray.data.read_parquet, paths: PATH/validation}
  columns: [x, y]
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.05}
train: {epochs: 2, global_batch_size: 24, precision: fp64, log_every_steps: 1}
parallel: {launcher: ray, strategy: ddp, cpus_per_worker: 1}
tracking: {log_model: false}
"""
CHECKPOINTS = ["checkpoint.every_steps=10", "checkpoint.keep=20"]
SHUFFLED = ["data.train.shuffle._target_=ray.data.FileShuffleConfig", "data.train.shuffle.seed=5"]


def rows(counts: list[int], *, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    inputs = [generator.normal(size=(count, 4)).astype(np.float32) for count in counts]
    return [(x, x.sum(1, keepdims=True) + np.float32(0.1)) for x in inputs]


def write(folder: Path, parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
    folder.mkdir()
    for number, part in enumerate(parts):
        columns = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
            for name, array in zip("xy", part, strict=True)
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "train", rows(FILES, seed=0))
    write(folder / "validation", rows(HELD_OUT, seed=1))
    (folder / "streamed.yaml").write_text(YAML.replace("PATH", str(folder)))
    return folder / "streamed.yaml"


class Trials:
    """One session of Ray, in which trainings run one after the other."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._recorder = Recorder(folder, subscribers=[])
        parallel = load(path, []).experiment.parallel
        session = Session(folder=folder, receive=self._recorder.receive, parallel=parallel, streams=True)
        self._launcher = registry.load("launchers", "ray").Launcher(session)

    def __enter__(self) -> "Trials":
        self._launcher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.__exit__(*error)
        self._recorder.close()

    def train(self, name: str, *more: str, workers: int, resume: Path | None = None) -> list[Any]:
        """The events of a training with checkpoints in a folder of its name."""
        file = load(self._path, [f"parallel.workers={workers}", *more])
        plan = make_plan(
            file.experiment, Resources(cpus=2, memory_mb=4096), allowed=allowed_packages(), with_baseline=False
        )
        places = {"name": name, "checkpoints": str(resume or self.checkpoints(name)), "resume": resume is not None}
        trial = plan.main.model_copy(update={**places, "cpus_per_worker": 1})
        open_trial(trial, self._recorder)
        self._launcher.launch(trial)
        return [event for event in journal.read(self._folder / journal.FILE_NAME) if event.trial == name]

    def checkpoints(self, name: str) -> Path:
        return self._folder / "checkpoints" / name

    def copied_up_to(self, name: str, step: int) -> Path:
        """The checkpoints of a training as they were after a step."""
        copy = shutil.copytree(
            self.checkpoints(name), self._folder / "checkpoints" / f"{name}-{step}-{os.urandom(2).hex()}"
        )
        for place in copy.iterdir():
            if place.name > f"step-{step:08d}":
                shutil.rmtree(place)
        return copy


@pytest.fixture(scope="module")
def trials(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with Trials(experiment, tmp_path_factory.mktemp("session")) as ready:
            yield ready


def series(events: list[Any], name: str = "train/loss") -> dict[int, float]:
    points = [point for event in events if isinstance(event, Metrics) for point in event.points]
    return {point.step: point.value for point in points if point.name == name}


def by_hand() -> tuple[dict[int, float], dict[int, float]]:
    """Losses of training and validation in plain PyTorch: the rows in the order of the files, cut into batches."""
    from pipeline.training.batches.order import mix

    train, held_out = (
        [torch.from_numpy(np.concatenate(column)).double() for column in zip(*rows(counts, seed=seed), strict=True)]
        for counts, seed in ((FILES, 0), (HELD_OUT, 1))
    )
    torch.manual_seed(mix(3, "model"))
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    for _ in range(EPOCHS):
        for inputs, targets in zip(*(column.split(BATCH) for column in train), strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses[len(losses) + 1] = loss.item()
        validation[len(losses)] = torch.nn.functional.mse_loss(model(held_out[0]), held_out[1]).item()
    return losses, validation


@pytest.mark.timeout(900)
def test_rays_blocks_are_the_rows_in_their_order(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the workers of a training, whose start would take most of the time."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path, size = experiment, 2
    trial = make_plan(
        load(path, [f"parallel.workers={size}"]).experiment,
        Resources(cpus=2, memory_mb=4096),
        allowed=allowed_packages(),
        with_baseline=False,
    ).main
    with started(LocalRayRequest(streams=True), verbose=False):
        ingest = Ingest(trial)
        facts = ingest.facts
        shards = Dealing().configure(ingest.datasets(trial), size, None, None)
        with ThreadPoolExecutor(size) as pool:
            dealt = list(pool.map(partial(_epochs, shards, facts), range(size)))

    expected = [torch.from_numpy(np.concatenate(column)) for column in zip(*rows(FILES, seed=0), strict=True)]
    assert facts.rows == {"train": sum(FILES), "validation": sum(HELD_OUT)}
    for first, second in zip(*dealt, strict=True):  # ranks, in each epoch
        assert len(first) == len(second) == STEPS_PER_EPOCH  # the last for nothing on the second rank
        for column, whole in enumerate(expected):
            for parts, batch in zip(zip(first, second, strict=True), whole.split(BATCH), strict=True):
                assert torch.equal(torch.cat([part[column] for part in parts]), batch)


def _epochs(shards: list[dict[str, Any]], facts: Facts, rank: int) -> list[list[Any]]:
    """The rows that one rank draws, by epoch and step."""
    plan = StreamOrder(samples=sum(FILES), global_batch_size=BATCH, seed=0, share_size=12)
    reader = StreamLoader(stream_of(shards[rank]["train"], "train", facts), order=plan, pin_memory=False)
    return [
        [
            batch if micro_batch.weight else tuple(column[:0] for column in batch)
            for micro_batch, batch in reader.batches(plan.micro_batches(epoch, rank=rank, world_size=2))
        ]
        for epoch in range(EPOCHS)
    ]


@pytest.mark.timeout(1200)
def test_global_batches_are_the_rows_in_their_order(trials: Trials) -> None:
    losses, validation = by_hand()
    events = trials.train("two", "train.gradient_accumulation=2", workers=2)

    assert series(events) == pytest.approx(losses, rel=0, abs=TOLERANCE)
    assert series(events, "validation/loss") == pytest.approx(validation, rel=0, abs=TOLERANCE)
    assert len(losses) == EPOCHS * STEPS_PER_EPOCH


@pytest.mark.timeout(1800)
def test_an_epochs_shuffle_and_a_resume_are_the_same_at_any_number_of_workers(trials: Trials) -> None:
    whole = series(events := trials.train("shuffled", *SHUFFLED, *CHECKPOINTS, workers=2))
    ordered, _ = by_hand()
    assert [step for step in whole if whole[step] == pytest.approx(ordered[step], rel=1e-6)] == []
    assert not [event for event in events if isinstance(event, Warned)]

    for name, step, workers in (("fewer", 50, 1), ("same", 20, 2)):  # in the second epoch, and in the first
        place = trials.copied_up_to("shuffled", step)
        resumed = trials.train(name, *SHUFFLED, *CHECKPOINTS, workers=workers, resume=place)
        assert [event.step for event in resumed if isinstance(event, Resumed)] == [step]
        rest = {number: loss for number, loss in whole.items() if number > step}
        assert series(resumed) == pytest.approx(rest, rel=0, abs=TOLERANCE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.columns=[x,z]"], r"data\.columns: z not found\. train has x, y"),
        (["data.train.paths=/nowhere"], r"data\.train.*/nowhere"),
        (
            ["train.global_batch_size=900"],
            r"train\.global_batch_size: is 900\. An epoch has 889 rows\. Use at most 889\.",
        ),
    ],
)
def test_what_ray_cannot_stream_is_refused(trials: Trials, changes: list[str], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        trials.train("refused", *changes, workers=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["parallel.launcher=torchrun"],
            r"parallel\.launcher: is torchrun, but pipeline\.data\.streamed needs Ray",
        ),
        (["parallel.launcher=inprocess"], r"parallel\.launcher: is inprocess, but .* Set launcher: ray"),
        (["parallel.workers=5"], r"train\.global_batch_size: is 24, but .* 5 workers can split equally"),
        (["parallel.workers=[1,6]"], r"train\.global_batch_size: is 24, but .* 5 workers can split equally"),
        (["loader.num_workers=1"], r"loader\.num_workers: has no effect on pipeline\.data\.streamed"),
    ],
)
def test_what_no_stream_can_do_is_refused_before(experiment: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load(experiment, changes)


def test_only_named_functions_of_ray_may_be_used(experiment: Path, components_of: Callable[[Path, str], str]) -> None:
    assert components_of(experiment, "ray.data.read_parquet") == ""
    assert "is not in an allowed package" in components_of(experiment, "ray.data.read_sql")
    assert "which is not allowed" in components_of(experiment, "ray.init")


@pytest.fixture
def components_of() -> Callable[[Path, str], str]:
    from pipeline.config import components

    def problems(path: Path, target: str) -> str:
        experiment = load(path, [f"data.train._target_={target}"]).experiment
        return "; ".join(
            problem.message for problem in components.check(experiment, allowed=allowed_packages()).problems
        )

    return problems
