"""Checkpoints in S3: what is kept, and what happens when the server is gone."""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import os
import random

import toys
from checkpointed import run, steps
from s3 import BUCKET, S3

ADDRESS = f"s3://{BUCKET}/run"


def test_an_outage_is_told_once_and_training_goes_on(s3: S3, draw: random.Random) -> None:
    down = draw.randint(3, 5)
    do = {down: s3.kill, down + 3: s3.start}
    outbox = run(
        ADDRESS, outbox=toys.Kept(lambda step: do.pop(step, lambda: None)()), train={"epochs": 4},
        checkpoint={"every_steps": 1, "keep": 1, "best": "validation/loss"},
    )  # fmt: skip

    assert len(outbox.series("train/loss")) == 12
    first, second = outbox.warnings
    assert f"could not be saved in {ADDRESS}: " in first
    assert "can be saved again. step-000000" in second
    assert outbox.saved[-1] == 12
    assert not set(range(down + 1, down + 3)) & set(outbox.saved)


def test_old_ones_go_and_the_best_stays(s3: S3) -> None:
    options = {"every_steps": 1, "keep": 2, "best": "validation/loss"}
    optimizer = {"_target_": "torch.optim.SGD", "lr": 0.5}
    outbox = run(ADDRESS, checkpoint=options, train={"epochs": 4}, optimizer=optimizer)
    losses = {point.step: point.value for point in outbox.points("validation/loss")}

    assert steps(ADDRESS) == sorted({min(losses, key=losses.__getitem__), 11, 12})


def test_a_missing_bucket_is_a_warning(s3: S3) -> None:
    (message,) = run("s3://elsewhere/run").warnings
    assert "could not be saved in s3://elsewhere/run: FileNotFoundError: The specified bucket does not exist" in message
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in message
