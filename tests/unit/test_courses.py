"""The course of a training, read from its events: by step and by time, without what is no training, with its gaps."""

import math
from itertools import count

import pytest

from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Metrics,
    Point,
    RunOpened,
    Started,
    TrialOpened,
)
from pipeline.report.numbers.courses import Course, bucket_size, courses, direction, smoothed, thinned

STEP_S = 0.5


def opened(title: str = "ddp, 2 workers", *, trial: str = "main", repeat: int = 0, at: float = 90.0) -> TrialOpened:
    return TrialOpened(trial=trial, role="main", title=title, repeat=repeat, tags={}, params={}, time=at)


def started(*, at: float, trial: str = "main") -> Started:
    return Started(
        trial=trial, total_steps=8, steps_per_epoch=4, epochs=2, train_samples=64, epoch_samples=64,
        validation_samples=8, parameters=9,
        devices=("cpu",), data_name="digits", data_digest="", time=at,
    )  # fmt: skip


def measured(first: int, losses: list[float], *, at: float, trial: str = "main", repeat: int = 0) -> Metrics:
    """What is reported after some steps, which took `STEP_S` each."""
    points = [Point("train/loss", first + index, loss) for index, loss in enumerate(losses)]
    last = first + len(losses) - 1
    points += [Point("throughput/samples_per_second", last, 32.0), Point("time/step_ms", last, 1000 * STEP_S)]
    return Metrics(trial=trial, step=last, epoch=1, points=tuple(points), time=at, repeat=repeat, steps=len(losses))


def validated(step: int, *, at: float, **values: float) -> Metrics:
    points = tuple(Point(f"validation/{name}", step, value) for name, value in values.items())
    return Metrics(step=step, epoch=step // 4, points=points, time=at)


def saved(step: int, *, at: float) -> CheckpointSaved:
    return CheckpointSaved(step=step, path="", seconds=0.4, blocked_seconds=0.1, time=at)


TRAINING: list[AnyEvent] = [
    opened(),
    started(at=100.0),
    measured(1, [4.0, 3.0], at=101.0),
    measured(3, [2.0, 1.0], at=102.0),
    validated(4, at=102.5, loss=1.5, accuracy=0.7),
    saved(4, at=103.0),
    measured(5, [1.0, math.nan, 1.0, 1.0], at=105.0),
    validated(8, at=105.5, loss=1.6, accuracy=0.8),
]


def test_losses_have_the_times_of_their_steps() -> None:
    (course,) = courses(TRAINING)
    assert (course.title, course.trial, course.steps_per_epoch) == ("ddp, 2 workers", "main", 4)
    assert course.loss.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert course.loss.seconds == [0.5, 1.0, 1.5, 2.0, 3.5, 4.0, 4.5, 5.0]
    assert math.isnan(course.loss.values[5])
    assert course.seconds == 5.5


def test_windows_and_pauses_fill_the_time() -> None:
    (course,) = courses(TRAINING)
    assert [(window.begin, window.end) for window in course.windows] == [(0.0, 1.0), (1.0, 2.0), (3.0, 5.0)]
    evaluation, checkpoint, last = course.pauses
    assert evaluation == (2.0, 2.5, "evaluation")
    assert checkpoint == pytest.approx((2.6, 2.7, "checkpoint"))
    assert last == (5.0, 5.5, "evaluation")


def test_the_best_of_a_metric_is_its_lowest_or_its_highest() -> None:
    (course,) = courses(TRAINING)
    assert {name: course.best(name) for name in course.validation} == {"validation/loss": 0, "validation/accuracy": 1}


def test_an_interruption_takes_no_time_and_repeated_steps_count_once() -> None:
    again = [
        opened("ddp, 1 worker"), started(at=1000.0), measured(5, [9.0, 9.0], at=1001.0),
        measured(9, [0.5, 0.4], at=1003.0),
    ]  # fmt: skip
    (course,) = courses([*TRAINING, *again])
    assert course.loss.steps == list(range(1, 11))
    assert course.loss.values[4] == 1.0
    assert course.loss.seconds[-1] == 5.5 + 3.0
    assert course.title == "ddp, 1 worker"


def test_a_point_of_several_steps_has_the_window_of_all() -> None:
    points = (Point("train/loss", 10, 2.0), Point("time/step_ms", 10, 100.0))
    points += (Point("throughput/samples_per_second", 10, 32.0),)
    (course,) = courses(
        [
            opened(), started(at=0.0), measured(1, [3.0], at=1.0),
            Metrics(time=5.0, step=10, epoch=1, points=points, steps=9),
        ]
    )  # fmt: skip
    assert (course.loss.steps, course.loss.seconds) == ([1, 10], [1.0, 5.0])
    assert course.windows[-1][:2] == pytest.approx((5.0 - 0.9, 5.0))


def test_trials_of_a_comparison_are_kept_apart_and_the_first_repeat_counts() -> None:
    def cell(trial: str, *, repeat: int, at: float, loss: float) -> list[AnyEvent]:
        losses = measured(1, [loss, loss], at=at + 1, trial=trial, repeat=repeat)
        return [opened(trial, trial=trial, repeat=repeat), started(at=at, trial=trial), losses]

    clock = count(step=10.0)
    found = courses(
        [
            e
            for r in range(2)
            for name in ("baseline", "ddp-2")
            for e in cell(name, repeat=r, at=next(clock), loss=2.0 + r)
        ]
    )
    assert [(course.trial, course.loss.values) for course in found] == [("baseline", [2.0, 2.0]), ("ddp-2", [2.0, 2.0])]


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, math.nan, math.inf]])
def test_a_trial_without_two_losses_has_no_curve(losses: list[float]) -> None:
    events: list[AnyEvent] = [opened(), started(at=0.0)]
    assert courses([*events, measured(1, losses, at=1.0)] if losses else events) == []


def test_figures_of_the_driver_are_no_curve() -> None:
    speedup = Metrics(
        step=8, epoch=2, points=(Point("speedup", 8, 1.7), Point("samples_per_second", 8, 40.0)), time=900
    )
    (course,) = courses([*TRAINING, speedup])
    assert course.seconds == 5.5
    assert len(course.windows) == 3


def run_of(params: dict[str, str]) -> RunOpened:
    return RunOpened(run="a", tracking_uri="", tracking_experiment="", tags={}, params=params, trials=())


@pytest.mark.parametrize(
    ("metric", "params", "expected"),
    [
        ("validation/loss", {}, "min"),
        ("validation/accuracy", {}, "max"),
        ("validation/word_error", {}, "min"),
        ("validation/quality", {}, None),
        ("validation/quality", {"metrics.quality._target_": "torchmetrics.regression.MeanSquaredError"}, "min"),
        ("validation/quality_2", {"metrics.quality._target_": "torchmetrics.classification.MulticlassF1Score"}, "max"),
        ("validation/quality", {"checkpoint.best": "validation/quality", "checkpoint.mode": "max"}, "max"),
        ("validation/loss", {"checkpoint.best": "validation/quality", "checkpoint.mode": "max"}, "min"),
        ("validation/accuracy", {"sweep.metric": "validation/accuracy", "sweep.mode": "min"}, "min"),
        ("validation/quality", {"checkpoint.best": "validation/quality", "checkpoint.mode": "auto"}, None),
    ],
)
def test_what_is_better_comes_from_the_experiment_or_from_the_name(
    metric: str, params: dict[str, str], expected: str | None
) -> None:
    assert direction(metric, run_of(params)) == expected


def test_what_is_better_comes_from_the_run_rather_than_from_the_name() -> None:
    run = run_of({}).model_copy(update={"directions": {"validation/accuracy": "min"}})
    assert direction("validation/accuracy", run) == "min"
    assert direction("validation/f1", run) is None
    assert direction("train/loss", run) == "min"


def test_a_metric_of_which_nobody_knows_what_is_better_has_no_best_value() -> None:
    (course,) = courses([*TRAINING, validated(12, at=109.0, quality=3.0)])
    assert course.best("validation/quality") is None


def test_the_average_is_that_of_equal_values_from_the_first_on() -> None:
    assert smoothed([3.0] * 5, span=10) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 3.0], span=2) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    values = smoothed([1.0, math.nan, 1.0], span=4)
    assert math.isnan(values[1])
    assert values[2] == 1.0


def test_thinning_keeps_the_extremes_and_the_gaps() -> None:
    xs = list(range(10_000))
    ys = [math.sin(x / 500) for x in xs]
    ys[1234], ys[4321], ys[7777] = 50.0, -50.0, math.nan
    few_x, few_y = thinned(xs, ys, buckets=100)
    assert len(few_x) <= 201
    assert few_x == sorted(few_x)
    assert {50.0, -50.0} <= set(few_y)
    assert few_x[[math.isnan(y) for y in few_y].index(True)] == 7777
    assert thinned(xs[:200], ys[:200], buckets=100) == (xs[:200], ys[:200])
    assert (bucket_size(200, buckets=100), bucket_size(201, buckets=100), bucket_size(10_000, buckets=100)) == (
        1,
        3,
        100,
    )


def test_an_opened_run_gives_its_parameters_to_its_trials() -> None:
    params = {"checkpoint.best": "validation/accuracy", "checkpoint.mode": "min"}
    run = RunOpened(run="r", tracking_uri="", tracking_experiment="", tags={}, params=params, trials=("main",))
    (course,) = courses([run, *TRAINING])
    assert isinstance(course, Course)
    assert course.best("validation/accuracy") == 0
