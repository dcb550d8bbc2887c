"""The course of a training, from its losses and its journal: by step, with its gaps, as it is drawn."""

import math

import pytest

from pipeline.protocol.events import AnyEvent, Metrics, Point
from pipeline.results.charts import Course, _smooth, _thin, draw_courses, iter_figures, read_course
from pipeline.results.record import Result

LOSSES = (4.0, 3.0, 2.0, 1.0, 1.0, math.nan, 1.0, 1.0)
RESULT = Result(kind="run", name="digits", title="", headline=(), verdict="")


def validated(step: int, *, trial: str = "main", **values: float) -> Metrics:
    points = tuple(Point(f"validation/{name}", step, value) for name, value in values.items())
    return Metrics(trial=trial, step=step, epoch=step // 4, points=points)


TRAINING: list[AnyEvent] = [
    Metrics(step=2, epoch=1, points=(Point("train/loss", 2, 3.0), Point("speedup", 2, 1.7))),
    validated(4, loss=1.5, accuracy=0.7),
    validated(8, loss=1.6, accuracy=0.8),
]


def test_a_course_has_the_loss_of_each_step_and_the_validation_by_its_steps() -> None:
    course = read_course("ddp, 2 workers", LOSSES, TRAINING)
    assert course == Course(
        "ddp, 2 workers",
        LOSSES,
        {"validation/loss": ([4, 8], [1.5, 1.6]), "validation/accuracy": ([4, 8], [0.7, 0.8])},
    )


def test_steps_that_were_done_again_count_once_and_other_trials_not_at_all() -> None:
    again = [validated(8, accuracy=0.1), validated(12, accuracy=0.9), validated(16, trial="ddp-2", accuracy=0.2)]
    course = read_course("", LOSSES, [*TRAINING, *again])
    assert course.validation["validation/accuracy"] == ([4, 8, 12], [0.7, 0.8, 0.9])


@pytest.mark.parametrize("losses", [(), (1.0,), (1.0, math.nan, math.inf)])
def test_a_training_without_two_losses_has_no_curve(losses: tuple[float, ...]) -> None:
    assert not list(iter_figures(RESULT, [read_course("", losses, TRAINING)]))
    ((title, *_),) = iter_figures(RESULT, [read_course("", losses, TRAINING), Course("", LOSSES)])
    assert title == "Learning curves"


def test_one_training_is_drawn_with_its_validation_and_several_by_their_names() -> None:
    course = read_course("trial 1", LOSSES, TRAINING)
    alone = draw_courses([course])
    assert all(f">{text}</text>" in alone for text in ("training", "training, smoothed", "validation"))
    assert ">validation/accuracy</text>" in alone
    several = draw_courses([course, Course("trial $2$ & <3>", LOSSES)])
    assert ">trial 1</text>" in several
    assert ">trial $2$ &amp; &lt;3&gt;</text>" in several
    assert ">training</text>" not in several


def test_the_average_is_that_of_equal_values_from_the_first_on() -> None:
    assert _smooth([3.0] * 5, span=10) == pytest.approx([3.0] * 5)
    assert _smooth([1.0, 3.0], span=2) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    values = _smooth([1.0, math.nan, 1.0], span=4)
    assert math.isnan(values[1])
    assert values[2] == 1.0


def test_thinning_keeps_the_extremes() -> None:
    xs = list(range(10_000))
    ys = [math.sin(x / 500) for x in xs]
    ys[1234], ys[4321] = 50.0, -50.0
    few_x, few_y = _thin(xs, ys)
    assert len(few_x) <= 1000
    assert few_x == sorted(few_x)
    assert {50.0, -50.0} <= set(few_y)
    assert _thin(xs[:1000], ys[:1000]) == (xs[:1000], ys[:1000])


def test_thinning_keeps_a_stretch_without_losses_as_a_gap() -> None:
    _, few = _thin(range(10_000), [1.0] * 5000 + [math.nan] * 100 + [1.0] * 4900)
    assert any(map(math.isnan, few))
