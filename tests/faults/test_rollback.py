"""A rollback is remembered: what it has left out stays left out in a run that is resumed."""

# promise: `rollback`

import random
import time
from collections.abc import Callable

import pytest
from attempts import DDP, PATIENCE_S, Attempt, kill
from census import compared, injected

from pipeline.protocol.events import Resumed, TrialOpened, Warned
from pipeline.training.batches.order import SampleOrder

EPOCHS = 3
"""Each has one bad batch, and three rollbacks are the most."""
ORDER = SampleOrder(samples=50, global_batch_size=16, seed=3)
BAD = ORDER.global_batch(0, 3)[0]
ROLLBACK = [
    f"data={{_target_: lab.holed, index: {BAD}}}", f"train.epochs={EPOCHS}", "train.evaluate_every_epochs=1",
    "train.on_nonfinite=rollback", "checkpoint.every_steps=2", "model.ms=120",
]  # fmt: skip
BAD_STEPS = [
    epoch * ORDER.steps_per_epoch + step + 1
    for epoch in range(EPOCHS)
    for step in range(ORDER.steps_per_epoch)
    if BAD in ORDER.global_batch(epoch, step)
]


@pytest.mark.parametrize(
    "launcher", [["parallel.launcher=inprocess", "parallel.workers=1"], DDP],
    ids=["inprocess", "torchrun"],
)  # fmt: skip
def test_what_it_left_out_stays_left_out(
    attempt_in: Callable[..., Attempt], draw: random.Random, launcher: list[str]
) -> None:
    undisturbed = attempt_in(*launcher, *ROLLBACK, folder="undisturbed")
    ended = undisturbed.run()
    assert ended.code == 0, ended.output
    assert left_out(undisturbed)[-1] == tuple(BAD_STEPS)
    injected("NaNs", 2 * EPOCHS)

    attempt = attempt_in(*launcher, *ROLLBACK, folder="killed")
    process = attempt.start()
    rollbacks = draw.randint(1, EPOCHS)
    deadline = time.monotonic() + PATIENCE_S
    attempt.wait_for_step(1, process)
    while len(left_out(attempt)[-1]) < rollbacks and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(process)  # before it has trained again what comes before the bad step
    ended = attempt.run("--resume")

    assert ended.code == 0, ended.output
    steps = ", ".join(map(str, BAD_STEPS[:rollbacks]))
    assert f"note: the batch of step {steps} stays left out since the rollback" in ended.stdout
    assert left_out(attempt)[-1] == tuple(BAD_STEPS)
    found, expected = (list(map(repr, each.losses)) for each in (attempt, undisturbed))  # NaN is no NaN's equal
    compared(found, expected)
    assert found == expected
    assert [float(repr(loss)) == float(repr(loss)) for _, loss in attempt.losses].count(False) == EPOCHS
    # Not once more than undisturbed, where each bad step was met once.
    told = [
        event.message for event in attempt.all_of(Warned) if "Rolling back to the latest checkpoint" in event.message
    ]
    assert len(told) == EPOCHS
    assert attempt.all_of(Resumed)


def left_out(attempt: Attempt) -> list[tuple[int, ...]]:
    """By attempt at the trial."""
    return [event.left_out for event in attempt.all_of(TrialOpened)]
