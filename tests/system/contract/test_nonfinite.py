"""NaN and infinity: the rank and its samples are named, a step that is skipped leaves no trace in the weights."""

# promise: a NaN stops all ranks and is reported with step, rank and samples; `skip`

import importlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import toys
from ranks import Ranks

from pipeline.errors import TrainingError
from pipeline.experiment.load import load
from pipeline.protocol.trial import Rank, Trial
from pipeline.train.build import build
from pipeline.train.order import SampleOrder
from pipeline.train.run import train

BATCH, EPOCHS, SAMPLES = 16, 2, 50
ORDER = SampleOrder(samples=SAMPLES, set_size=SAMPLES, global_batch_size=BATCH, seed=3)
PER_EPOCH = ORDER.steps_per_epoch
BAD_STEP = 2  # of the first epoch, counted from 1
BAD = ORDER.global_batch(BAD_STEP - 1)[5]  # Dealt to rank 1 of 2
BAD_STEPS = [step + 1 for step in range(EPOCHS * PER_EPOCH) if BAD in ORDER.global_batch(step)]
SKIP = ["train.on_nonfinite=skip", "optimizer.momentum=0.9"]
CASES = {
    "stop": [],
    "skip": SKIP,
    "infinite loss": [*SKIP, "loss._target_=lab.Spiky", "data.value=1.0e+30"],
    "clipped": ["train.clip_grad_norm=0.5", "loss._target_=lab.Steep"],
    "poisoned weights": ["loss._target_=lab.Steep", "checkpoint.every_steps=1"],
    "always": [*SKIP, "loss._target_=lab.NotANumber", "train.epochs=20"],
}


class Outcome(NamedTuple):
    """What a case came to."""

    error: str
    warnings: list[str]
    series: dict[str, dict[int, float]]
    weights: dict[str, torch.Tensor]
    checkpoints: list[str]


def _trial(case: str, *, strategy: str) -> Trial:
    data = f"data={{_target_: lab.holed, index: {BAD}}}"
    experiment = load("lab.yaml", ["train.precision=fp64", data, *CASES[case]]).experiment
    return toys.trial(experiment=experiment, strategy=strategy)


def _train(rank: Rank, trial: Trial, folder: Path) -> Outcome:
    rank = rank.model_copy(update={"local_rank": 0, "local_world_size": 1, "node": f"node{rank.rank}"})
    outbox, error = toys.Kept(), ""
    trial = trial.model_copy(update={"workers": rank.world_size, "checkpoints": str(folder)})
    try:
        train(trial, rank=rank, outbox=outbox)
    except TrainingError as raised:
        error = str(raised)
    names = ("train/loss", "train/skipped_steps")
    series = {name: {point.step: point.value for point in outbox.points(name)} for name in names}
    saved = [path.name for path in folder.iterdir()] if folder.exists() else []
    return Outcome(error, outbox.warnings, series, outbox.files.get("model/weights.pt", {}), saved)


@pytest.fixture(scope="module")
def outcomes(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    """Those of rank 0 by case and world size; all ranks fail alike."""
    found, folder = {}, tmp_path_factory.mktemp("nonfinite")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        with Ranks(2) as ranks:
            for case in CASES:
                found[case, 1] = _train(Rank(), _trial(case, strategy="single"), folder / f"{case} alone")
                found[case, 2], second = ranks.call(_train, _trial(case, strategy="ddp"), folder / case)
                assert found[case, 2].error == second.error
    return found


Outcomes = dict[tuple[str, int], Outcome]
worlds = pytest.mark.parametrize("world", [1, 2])


def without_the_bad_batch() -> dict[str, torch.Tensor]:
    """The weights that a training without our loop reaches that never sees that global batch."""
    model = build(_trial("skip", strategy="single"), rank=Rank()).model
    lab = importlib.import_module("lab")
    inputs, targets = lab.holed(BAD, 0.0)[0].tensors
    criterion = lab.Spiky()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(EPOCHS * PER_EPOCH):
        batch = ORDER.global_batch(step)
        if BAD not in batch:
            optimizer.zero_grad()
            criterion(model(inputs[batch].double()), targets[batch]).backward()
            optimizer.step()
    return model.state_dict()


@worlds
@pytest.mark.parametrize("case", ["skip", "infinite loss"])
def test_a_step_that_is_skipped_leaves_no_trace(
    outcomes: Outcomes, case: str, world: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    expected = without_the_bad_batch()
    torch.testing.assert_close(outcomes[case, world].weights, dict(expected), rtol=0.0, atol=1e-12)


@worlds
def test_skipped_steps_are_counted_and_told(outcomes: Outcomes, world: int) -> None:
    outcome = outcomes["skip", world]
    first, summary = outcome.warnings
    assert outcome.series["train/skipped_steps"].items() >= {PER_EPOCH: 1.0, 2 * PER_EPOCH: 2.0}.items()
    assert [step for step, loss in outcome.series["train/loss"].items() if loss != loss] == BAD_STEPS
    assert first.startswith(f"the loss is nan in step {BAD_STEP} (epoch 1); ")
    steps = ", ".join(map(str, BAD_STEPS))
    assert summary == f"2 steps were skipped because a loss or gradient was not finite: {steps}"


@worlds
@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("always", "10 steps in a row were skipped because a loss or gradient was not finite: 1, 2, 3, 4, 5, 6, 7, 8 "),
        ("clipped", "the gradient norm is nan in step 1 (epoch 1); its global batch is samples "),
        ("poisoned weights", "weights are not finite after step 1, "),
    ],
)  # fmt: skip
def test_what_is_not_finite_ends_the_training(outcomes: Outcomes, case: str, error: str, world: int) -> None:
    outcome = outcomes[case, world]
    assert outcome.error.startswith(error)
    assert outcome.checkpoints == [] or case == "always"  # which leaves the weights as they were


def test_the_rank_and_its_samples_are_named(outcomes: Outcomes) -> None:
    batch = ORDER.global_batch(BAD_STEP - 1).tolist()
    where, share = f"the loss is nan in step {BAD_STEP} (epoch 1); ", ", ".join(map(str, batch[1::2]))
    assert outcomes["stop", 1].error.startswith(f"{where}its global batch is samples {batch[0]}, ")
    assert outcomes["stop", 2].error.startswith(f"{where}not finite: rank 1 on node1, samples {share}; the inputs of ")
    assert BAD in batch[1::2]
