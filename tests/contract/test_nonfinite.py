"""NaN and infinity: the rank and its samples are named, a step that is skipped leaves no trace in the weights."""

# promise: a NaN stops all ranks and is reported with step, rank and samples; `skip`

import importlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import on_ranks

from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.launchers.base import DirectOutbox, Session
from pipeline.protocol.events import AnyEvent, Failed, Metrics, Warned, event_from_json, event_to_json
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.training.batches.order import SampleOrder
from pipeline.training.build import build
from pipeline.worker import main

BATCH, EPOCHS, SAMPLES = 16, 2, 50
ORDER = SampleOrder(samples=SAMPLES, global_batch_size=BATCH, seed=3)
BAD_STEP = 2  # of each epoch, counted from 1
BAD = ORDER.global_batch(0, BAD_STEP - 1)[5]
"""Dealt to rank 1 of 2."""
SKIP = ["train.on_nonfinite=skip", "optimizer.momentum=0.9"]
SPIKY = "loss._target_=lab.Spiky"
CASES = {
    "stop": [],
    "skip": SKIP,
    "infinite loss": [*SKIP, SPIKY, "data.value=1.0e+30"],
    "clipped": ["train.clip_grad_norm=0.5", "loss._target_=lab.Steep"],
    "poisoned weights": ["loss._target_=lab.Steep", "checkpoint.every_steps=1"],
    "always": [*SKIP, "loss._target_=lab.NotANumber", "train.epochs=20"],
    "batch norm": [*SKIP, "model._target_=lab.Normed", "train.global_batch_size=10"],
}


class Outcome(NamedTuple):
    """What a case came to, by world size."""

    events: list[AnyEvent]
    weights: dict[str, torch.Tensor]
    checkpoints: list[str]

    def texts(self, kind: type[Warned] | type[Failed]) -> list[str]:
        return [e.message if isinstance(e, Warned) else e.error for e in self.events if isinstance(e, kind)]

    def series(self, name: str) -> dict[int, float]:
        metrics = [event for event in self.events if isinstance(event, Metrics)]
        return {point.step: point.value for event in metrics for point in event.points if point.name == name}


@pytest.fixture(scope="module")
def outcomes(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folders = {1: tmp_path_factory.mktemp("one"), 2: tmp_path_factory.mktemp("two")}
        _train(Rank(), [_trial(case, 1) for case in CASES], folders[1])
        on_ranks(_train, [_trial(case, 2) for case in CASES], folders[2], folder=folders[2])
    torch.set_num_threads(threads)
    return {(case, world): _read(folder / case) for world, folder in folders.items() for case in CASES}


def _trial(case: str, workers: int) -> Trial:
    data = f"data={{_target_: lab.holed, index: {BAD}}}"
    more = ["train.precision=fp64", f"parallel.workers={workers}", data, *CASES[case]]
    return Training(
        name=case, experiment=load("lab.yaml", more).experiment, strategy="ddp",
        launcher="inprocess", workers=workers, devices_per_worker=0, device="cpu", cpus_per_worker=1,
        allowed=allowed_packages(),
    )  # fmt: skip


def _train(rank: Rank, trials: list[Trial], folder: Path) -> None:
    where = Rank(rank=rank.rank, world_size=rank.world_size, node=f"node{rank.rank}")  # one rank on each node
    for trial in trials:
        events: list[AnyEvent] = []
        session = Session(
            folder=folder / trial.name / f"{rank.rank}", receive=events.append, parallel=trial.experiment.parallel
        )
        session.folder.mkdir(parents=True)
        with suppress(main.WorkerFailed):
            trial = trial.model_copy(update={"checkpoints": str(folder / trial.name / "checkpoints")})
            main.run(trial, rank=where, outbox=DirectOutbox(session))
        (session.folder / "events.jsonl").write_bytes(b"\n".join(map(event_to_json, events)))


def _read(folder: Path) -> Outcome:
    events = [event_from_json(line) for line in (folder / "0" / "events.jsonl").read_bytes().splitlines()]
    weights = folder / "0" / "model" / "weights.pt"
    checkpoints = folder / "checkpoints"
    saved = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []
    return Outcome(events, torch.load(weights) if weights.exists() else {}, saved)


Outcomes = dict[tuple[str, int], Outcome]
worlds = pytest.mark.parametrize("world", [1, 2])


@pytest.fixture
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)


def without_the_bad_batch(case: str) -> dict[str, torch.Tensor]:
    """The weights that a training without our loop reaches that never sees that global batch."""
    context = build(_trial(case, 1).model_copy(update={"strategy": "single"}), rank=Rank())
    lab = importlib.import_module("lab")
    inputs, targets = lab.holed(BAD, 0.0)[0].tensors
    criterion = lab.Spiky()
    optimizer = torch.optim.SGD(context.model.parameters(), lr=0.1, momentum=0.9, fused=True)  # as ours, to the bit
    for epoch in range(EPOCHS):
        for step in range(ORDER.steps_per_epoch):
            batch = ORDER.global_batch(epoch, step)
            if BAD not in batch:
                optimizer.zero_grad()
                criterion(context.model(inputs[batch].double()), targets[batch]).backward()
                optimizer.step()
    return context.model.state_dict()


@worlds
@pytest.mark.parametrize("case", ["skip", "infinite loss"])
def test_a_step_that_is_skipped_leaves_no_trace(outcomes: Outcomes, in_project: None, case: str, world: int) -> None:
    reached, expected = outcomes[case, world].weights, without_the_bad_batch(case)
    tolerance = 0.0 if world == 1 else 1e-12  # two ranks add up in another order
    assert reached.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(reached[name], weight, rtol=0.0, atol=tolerance)


@worlds
def test_skipped_steps_are_counted_and_told(outcomes: Outcomes, world: int) -> None:
    outcome = outcomes["skip", world]
    bad = [epoch * ORDER.steps_per_epoch + step + 1 for epoch in range(EPOCHS) for step in range(ORDER.steps_per_epoch)
           if BAD in ORDER.global_batch(epoch, step)]  # fmt: skip
    first, summary = outcome.texts(Warned)

    assert outcome.series("train/skipped_steps").items() >= {4: 1.0, 8: 2.0}.items()
    assert {step for step, loss in outcome.series("train/loss").items() if loss != loss} == set(bad)
    assert first.startswith(f"the loss is nan in step {bad[0]} (epoch 1); ")
    assert summary == f"2 steps were skipped because a loss or gradient was not finite: {bad[0]}, {bad[1]}"


@worlds
def test_batch_statistics_stay_finite(outcomes: Outcomes, world: int) -> None:
    weights = outcomes["batch norm", world].weights
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert weights["layers.0.running_var"].min() < 1.0  # they do follow the batches


@worlds
def test_it_stops_after_ten_in_a_row(outcomes: Outcomes, world: int) -> None:
    (error,) = outcomes["always", world].texts(Failed)
    assert error.startswith(
        "10 steps in a row were skipped because a loss or gradient was not finite: 1, 2, 3, 4, 5, 6, 7, 8 ... (10"
    )


def test_the_rank_and_its_samples_are_named(outcomes: Outcomes) -> None:
    (alone,), (shared,) = (outcomes["stop", world].texts(Failed) for world in (1, 2))
    batch = ORDER.global_batch(0, BAD_STEP - 1)

    assert alone.startswith(f"the loss is nan in step {BAD_STEP} (epoch 1); its global batch is samples {batch[0]}, ")
    share = ", ".join(map(str, batch[1::2]))
    assert shared.startswith(
        f"the loss is nan in step {BAD_STEP} (epoch 1); not finite: rank 1 on node1, samples {share}. "
    )
    assert BAD in batch[1::2]


@worlds
def test_gradients_that_are_not_finite_stop_training(outcomes: Outcomes, world: int) -> None:
    (error,) = outcomes["clipped", world].texts(Failed)
    assert error.startswith("the gradient norm is nan in step 1 (epoch 1); its global batch is samples ")


@worlds
def test_weights_that_are_not_finite_are_not_saved(outcomes: Outcomes, world: int) -> None:
    outcome = outcomes["poisoned weights", world]
    (error,) = outcome.texts(Failed)
    assert error.startswith("weights are not finite after step 1, ")
    assert outcome.checkpoints == []
