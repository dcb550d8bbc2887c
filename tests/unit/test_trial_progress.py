"""What is told of a running trial: steps, stage, pace, values, and how long all trials take."""

# promise: a terminal shows at once what is waited for, then a bar that moves, and what is done after the last step

import math

import pytest
from samples import MAIN, finished, spread, trial

from pipeline.drive.checkpoints import directions
from pipeline.experiment.targets import allowed_packages
from pipeline.experiment.values import Component
from pipeline.protocol.events import (
    AnyEvent,
    FirstStep,
    Heartbeat,
    Metrics,
    Phase,
    Point,
    Resumed,
    RunOpened,
    Started,
    Trained,
    TrialOpened,
)
from pipeline.protocol.trial import Rank
from pipeline.record.trial_progress import RunProgress, TrialProgress, figures, fitted, left
from pipeline.wording import clock

DIRECTIONS = {"validation/accuracy": "max", "validation/loss": "min"}


def started(*, total: int = 40) -> Started:
    return Started(
        time=1, total_steps=total, steps_per_epoch=total // 4, epochs=4, train_samples=1437, epoch_samples=1437,
        validation_samples=360,
        parameters=78186, devices=("node-1 cpu",), data_name="digits", data_digest="0",
    )  # fmt: skip


def beat(step: int, phase: Phase = Phase.FORWARD, *, time: float = 2, rank: int = 0) -> Heartbeat:
    return Heartbeat(time=time, rank=Rank(rank=rank, world_size=2), pid=1, step=step, phase=phase, idle_s=0)


def metrics(step: int, *, time: float = 2, **values: float) -> Metrics:
    points = tuple(Point(name.replace("__", "/"), step, value) for name, value in values.items())
    return Metrics(time=time, step=step, epoch=-(-step // 10), points=points)


def after(*events: AnyEvent) -> TrialProgress:
    progress = TrialProgress(DIRECTIONS)
    for event in (started(), FirstStep(time=2), *events):
        progress.update(event)
    return progress


def trained(*, is_measured: bool = True) -> Trained:
    return Trained(time=60, result=finished("main", spread(1312)).result, is_measured=is_measured)


def test_a_heartbeat_tells_the_steps_that_are_done() -> None:
    assert after(beat(24, Phase.UPDATING)).position() == ["step 23/40", "epoch 3/4"]
    assert after(beat(24, Phase.REPORTING)).position()[0] == "step 24/40"
    assert after(beat(31, Phase.READING)).position() == ["step 30/40", "epoch 4/4"]
    assert after(beat(24), beat(30, rank=1)).position()[0] == "step 23/40"
    assert after(metrics(24), beat(3)).position()[0] == "step 24/40"  # of a trial that is compared with it
    assert after(Resumed(time=1, step=20, epoch=2, checkpoint="c")).position() == ["step 20/40", "epoch 2/4"]


@pytest.mark.parametrize(
    ("events", "stage"),
    [
        ((beat(3),), ""),
        ((beat(3, Phase.EVALUATING),), "evaluating"),
        ((beat(3, Phase.SAVING),), "saving"),
        ((beat(3, Phase.BUILDING),), "compiling"),
        ((metrics(40), beat(40, Phase.EVALUATING)), "evaluating"),
        ((metrics(40), beat(40, Phase.WAITING)), "finishing"),
        ((metrics(40), trained(), beat(2, Phase.FORWARD)), "measuring"),
        ((metrics(40), trained(is_measured=False), beat(40, Phase.REPORTING)), "finishing"),
    ],
)
def test_it_says_what_is_done_besides_steps(events: tuple[AnyEvent, ...], stage: str) -> None:
    assert after(*events).stage == stage


def test_it_says_what_the_first_step_waits_for() -> None:
    progress = TrialProgress()
    assert progress.stage == ""
    said = []
    for event in (beat(0, Phase.BUILDING), started(), beat(0, Phase.READING), beat(1), beat(1, Phase.BUILDING)):
        progress.update(event)
        said.append(progress.stage)
    waiting = "waiting for the first batch"
    assert said == ["building model and data", waiting, waiting, "in the first step", "compiling"]


def test_the_rest_takes_as_long_as_the_steps_so_far() -> None:
    assert after(beat(2, time=3)).left_s(3) is None
    going = after(beat(2, time=3), beat(12, time=8))
    assert going.left_s(8) == pytest.approx(29 * 0.5)
    assert going.left_s(9) == pytest.approx(29 * 0.5 - 1)
    assert going.left_s(1000) == 0
    assert going.left_s(0) == going.left_s(8)  # of a clock that is behind
    assert after(beat(2, time=3), metrics(40, time=8)).left_s(8) is None


def test_reports_that_a_resumed_training_repeats_say_nothing_of_its_pace() -> None:
    progress = TrialProgress()
    resumed = Resumed(time=1000, step=20, epoch=2, checkpoint="c")
    for event in (started(), resumed, metrics(20, time=5), FirstStep(time=1001), metrics(21, time=1002),
                  metrics(23, time=1004)):  # fmt: skip
        progress.update(event)
    assert progress.left_s(1004) == pytest.approx(17)


def test_validation_names_the_best_so_far_if_it_was_an_earlier_one() -> None:
    first = metrics(10, validation__loss=0.5, validation__accuracy=0.91)
    second = metrics(20, validation__loss=0.6, validation__accuracy=0.93)
    third = metrics(30, validation__loss=0.7, validation__accuracy=0.92)

    assert list(after(first).validation()) == ["validation/accuracy 0.91", "validation/loss 0.5"]
    assert next(after(first, second).validation()) == "validation/accuracy 0.93"
    assert list(after(first, second, third).validation()) == [
        "validation/accuracy 0.92", "best 0.93 (epoch 2)", "validation/loss 0.7", "best 0.5 (epoch 1)"
    ]  # fmt: skip
    nan = metrics(10, validation__loss=math.nan, validation__other=2.0)  # never the best; without a direction none is
    other = metrics(20, validation__loss=0.5, validation__other=1.0)
    assert list(after(nan, other).validation()) == ["validation/loss 0.5", "validation/other 1"]


def test_the_values_of_a_large_matrix_are_counted() -> None:
    places = [(true, predicted) for true in range(3) for predicted in range(3)]
    matrix = {f"validation__of_3_true_{true}_predicted_{predicted}": 5.0 for true, predicted in places}
    progress = after(metrics(10, validation__loss=0.7, **matrix, validation__recall_0=0.9, validation__recall_1=0.8))

    shown = ["validation/of_3 (9 values)", "validation/recall_0 0.9", "validation/recall_1 0.8"]
    assert [*progress.validation()] == ["validation/loss 0.7", *shown]
    assert [*figures(progress.values)] == ["validation/loss 0.7", *shown]


def test_directions_are_those_of_the_metrics_the_best_checkpoints_first() -> None:
    metric = {
        "accuracy": Component(_target_="torchmetrics.classification.MulticlassAccuracy", num_classes=10),
        "distance": Component(_target_="torchmetrics.classification.MulticlassHammingDistance", num_classes=10),
        "confusion": Component(_target_="torchmetrics.classification.MulticlassConfusionMatrix", num_classes=10),
    }
    known = MAIN.experiment.model_copy(update={"metrics": metric})
    assert list(directions(known, allowed=allowed_packages()).items()) == [
        ("validation/accuracy", "max"), ("validation/distance", "min"), ("validation/loss", "min")
    ]  # fmt: skip
    for best, mode, direction in (
        ("validation/loss", "auto", "min"),
        ("validation/accuracy_3", "auto", "max"),
        ("validation/confusion", "max", "max"),
    ):
        saved = known.checkpoint.model_copy(update={"best": best, "mode": mode})
        found = directions(known.model_copy(update={"checkpoint": saved}), allowed=allowed_packages())
        assert next(iter(found.items())) == (best, direction)


# All trials


def opened(name: str, title: str, *, repeat: int = 0) -> TrialOpened:
    return TrialOpened(time=0, trial=name, role="cell", title=title, repeat=repeat, tags={}, params={})


def test_a_trial_keeps_its_number_in_a_benchmark_when_it_is_launched_again() -> None:
    run = RunProgress()
    run.update(RunOpened(run="", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=(), launches=4))
    for name, repeat in (("single", 0), ("ddp", 0), ("ddp", 0), ("single", 1)):
        run.update(opened(name, name, repeat=repeat))
    assert run.label == "[3/4] single"


def test_a_trial_that_a_training_is_compared_with_is_not_launched() -> None:
    main = MAIN.model_copy(update={"compared_with": (trial("baseline", "baseline"),)})
    run = RunProgress([main, *main.compared_with])
    run.update(opened("baseline", "1 worker"))
    assert not run.is_launched
    run.update(opened("main", "ddp, 2 workers"))
    assert run.is_launched


def test_words() -> None:
    assert [clock(seconds) for seconds in (0.4, 35.2, 65, 3723)] == ["0:00", "0:35", "1:05", "1:02:03"]
    assert left(None) == left(0.4) == []
    assert left(0.6) == ["0:01 left"]
    assert fitted(["epoch 1/2", "a long one that does not fit", "loss 2"], width=18) == "epoch 1/2, loss 2"
