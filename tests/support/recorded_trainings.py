"""Trainings that were recorded without training, for commands that look back."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from samples import finished, spread

from pipeline.protocol.events import Metrics, Point, RunClosed, RunOpened, Started
from pipeline.protocol.labels import Status
from pipeline.record import loss_file
from pipeline.record.recorder import Recorder
from pipeline.record.runs import RunSummary, summarize_run

ACCURACY = {"metrics.accuracy._target_": "torchmetrics.classification.MulticlassAccuracy"}


def training(
    folder: Path,
    name: str,
    *,
    seed: int,
    lr: str = "0.1",
    metrics: Mapping[str, float] = {"validation/accuracy": 0.9},
    losses: Sequence[float] = (),
    data: str = "d1",
    status: Status = "FINISHED",
    role: str = "main",
    began: float = 1.7e9,
    params: Mapping[str, str] = {},
    evaluations: Sequence[float] = (),
    step_s: float = 1.0,
    workers: int = 1,
) -> RunSummary:
    """Record a training without training; each of its ``evaluations``, of accuracy, is after a step of 8 samples."""
    place = folder / name
    place.mkdir(parents=True)
    settings = {"name": "digits", "seed": str(seed), "optimizer.lr": lr, "tracking.uri": name, **ACCURACY, **params}
    tags = {"role": role, "strategy": "single", "world_size": str(workers)}
    with closing(Recorder(place, subscribers=[])) as recorder:
        recorder.receive(
            RunOpened(time=began, run=name, tracking_uri="u", tracking_experiment="digits", tags=tags, params=settings,
                      trials=("main",), directions={"validation/accuracy": "max", "validation/loss": "min"})
        )  # fmt: skip
        recorder.receive(
            Started(trial="main", total_steps=1, steps_per_epoch=1, epochs=1, train_samples=8, epoch_samples=8,
                    validation_samples=1,
                    parameters=1, devices=(), data_name="d", data_digest=data)
        )  # fmt: skip
        for step, value in enumerate(evaluations, 1):
            pace = Point("time/step_ms", step, 1000 * step_s)
            recorder.receive(Metrics(step=step, epoch=1, steps=1, points=(pace,)))
            recorder.receive(Metrics(step=step, epoch=1, points=(Point("validation/accuracy", step, value),)))
        if status == "FINISHED":
            recorder.receive(finished("main", spread(100), metrics=dict(metrics)))
        recorder.receive(RunClosed(time=began + 60, status=status, message="" if status == "FINISHED" else "why"))
    if losses:
        loss_file.write(place, losses, first=1)
    found = summarize_run(place)
    assert found is not None
    return found
