"""Time to target counts training steps only, and is compared in pairs."""

import math

import pytest

from pipeline.report.numbers.courses import Course, Series, Window
from pipeline.report.numbers.time_to_target import TimeToTarget, find_target, seconds_until


def course(values: list[float], *, step_s: float = 1.0, pause_s: float = 5.0) -> Course:
    """A training of ten steps before each evaluation, which takes ``pause_s``."""
    found, now = Course(title="x"), 0.0
    series = found.validation.setdefault("validation/accuracy", Series())
    for number, value in enumerate(values, 1):
        found.windows.append(Window(now, now + 10 * step_s, 1.0))
        now += 10 * step_s + pause_s
        series.add(10 * number, now, value)
    return found


@pytest.mark.parametrize(
    ("values", "target", "expected"),
    [
        ([0.5, 0.7, 0.9], 0.8, 25.0),  # half way between the second and the third evaluation
        ([0.5, 0.7, 0.9], 0.7, 20.0),
        ([0.5, 0.7, 0.9], 0.3, 10.0),  # reached before the first evaluation: nothing to interpolate
        ([0.5, 0.9, 0.1], 0.7, 15.0),  # the first time counts
        ([0.5, math.nan, 0.9], 0.7, 20.0),
        ([0.5, 0.6], 0.7, None),
        ([], 0.7, None),
    ],
)
def test_seconds_of_steps_until_the_target(values: list[float], target: float, expected: float | None) -> None:
    found = seconds_until(course(values), metric="validation/accuracy", target=target, direction="max")
    assert found == (pytest.approx(expected) if expected is not None else None)


def test_a_loss_falls_to_its_target() -> None:
    assert seconds_until(course([3, 1]), metric="validation/accuracy", target=2, direction="min") == pytest.approx(15)


def test_the_default_target_is_the_worst_of_the_best() -> None:
    runs = [course([0.5, 0.9, 0.8]), course([0.4, 0.7]), course([])]
    assert find_target(runs, metric="validation/accuracy", direction="max") == 0.7
    assert find_target(runs, metric="validation/accuracy", direction="min") == 0.5
    assert find_target([course([])], metric="validation/accuracy", direction="max") is None


def test_the_ratio_is_that_of_the_pairs() -> None:
    found = TimeToTarget.compare({3: (100.0, 50.0), 4: (220.0, 100.0), 5: (90.0, 50.0)}, metric="m", target=0.97)
    logs = [math.log(2), math.log(2.2), math.log(1.8)]
    assert found.ratio == pytest.approx(math.exp(sum(logs) / 3))
    assert found.low is not None and found.high is not None and 1 < found.low < found.ratio < found.high  # noqa: PT018
    (line,) = found.format("A", "B (2 workers)")
    assert line.startswith("m 0.97: B (2 workers) in 1:03, A in 2:06: 1.99x sooner (95% CI 1.55x to 2.56x)")


def test_what_does_not_reach_the_target_is_named_and_does_not_count() -> None:
    found = TimeToTarget.compare({3: (50.0, 100.0), 4: (None, 90.0)}, metric="m", target=0.97)
    lines = [*found.model_copy(update={"prices": (2.0, 4.0), "watts": (None, 300.0)}).format("A", "B")]
    assert lines == [
        "not reached: m 0.97 by A with seed 4",
        "m 0.97: B in 1:40 (price 0.11, energy 8.3 Wh), A in 50 s (price 0.028): 2.00x later, inconclusive, only the "
        "1 of 2 pairs that both reached it",
    ]
    assert list(TimeToTarget.compare({3: (None, None)}, metric="m", target=1).format("A", "B")) == [
        "not reached: m 1 by A with seed 3, B with seed 3"
    ]


def test_steps_that_a_resumed_training_did_again_count_once() -> None:
    found = course([0.5, 0.7])
    found.windows = [Window(0, 10, 1.0, 10), Window(10, 20, 1.0, 20), Window(30, 40, 1.0, 20), Window(40, 50, 1.0, 30)]
    assert found.measure_training() == pytest.approx(30)
    assert found.measure_training(until=25) == pytest.approx(20)
