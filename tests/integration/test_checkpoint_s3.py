"""Checkpoints in S3: what is kept, and what happens when the server is gone."""

# promise: random kills, SIGTERM, damaged checkpoints, three ranks, S3

import os
import random

import toys
from census import injected
from s3 import BUCKET, S3, steps

from pipeline.protocol.events import AnyEvent, CheckpointSaved, Metrics, Warned
from pipeline.protocol.rank import Rank
from pipeline.training.loop import train


class Outage(toys.Kept):
    """Kills the server after one step's loss, and has it back after another's."""

    def __init__(self, s3: S3, *, down: int, up: int) -> None:
        super().__init__()
        self._do = {down: s3.kill, up: s3.start}

    def event(self, event: AnyEvent) -> None:
        super().event(event)
        if isinstance(event, Metrics) and event.step in self._do:
            self._do.pop(event.step)()


def test_an_outage_is_told_once_and_training_goes_on(s3: S3, draw: random.Random) -> None:
    down = draw.randint(3, 5)
    outbox = Outage(s3, down=down, up=down + 3)
    trial = toys.trial(checkpoint={"every_steps": 1, "keep": 1, "best": "validation/loss"}, train={"epochs": 4})
    train(trial.model_copy(update={"checkpoints": f"s3://{BUCKET}/run"}), rank=Rank(), outbox=outbox)
    injected("outages")
    saved = [event.step for event in outbox.events if isinstance(event, CheckpointSaved)]
    messages = [event.message for event in outbox.events if isinstance(event, Warned)]

    assert len(outbox.series("train/loss")) == 12
    assert len(messages) == 2
    assert f"could not be saved in s3://{BUCKET}/run: EndpointConnectionError" in messages[0]
    assert "can be saved again. step-000000" in messages[1]
    assert saved[-1] == 12
    assert not set(range(down + 1, down + 3)) & set(saved)


def test_old_ones_go_and_the_best_stays(s3: S3) -> None:
    options = {"every_steps": 1, "keep": 2, "best": "validation/loss"}
    trial = toys.trial(checkpoint=options, train={"epochs": 4}, optimizer={"_target_": "torch.optim.SGD", "lr": 0.5})
    outbox = toys.Kept()
    train(trial.model_copy(update={"checkpoints": f"s3://{BUCKET}/run"}), rank=Rank(), outbox=outbox)
    losses = {point.step: point.value for point in outbox.points("validation/loss")}

    assert steps(f"s3://{BUCKET}/run") == sorted({min(losses, key=losses.__getitem__), 11, 12})


def test_a_missing_bucket_is_a_warning(s3: S3) -> None:
    outbox = toys.Kept()
    train(toys.trial().model_copy(update={"checkpoints": "s3://elsewhere/run"}), rank=Rank(), outbox=outbox)
    (message,) = (event.message for event in outbox.events if isinstance(event, Warned))

    assert "could not be saved in s3://elsewhere/run: FileNotFoundError: The specified bucket does not exist" in message
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in message
