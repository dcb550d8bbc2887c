"""Where a training's wall clock went, on journals whose seconds can be counted by hand."""

# promise: where a training's wall clock goes, every second with one name

from collections.abc import Iterable
from typing import Any

import pytest
import samples

from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Failed,
    FirstStep,
    Metrics,
    Point,
    Resumed,
    RunClosed,
    RunOpened,
    SystemMetrics,
    Trained,
    TrialOpened,
)
from pipeline.protocol.rank import Rank
from pipeline.results.goodput import Goodput, WallClock

DAY = 86400.0


def opened(time: float) -> RunOpened:
    return RunOpened(
        time=time, run="r", tracking_uri="", tracking_experiment="", tags={}, params={}, trials=("main",)
    )  # fmt: skip


def launched(time: float, *, trial: str = "main") -> TrialOpened:
    role: Any = "main" if trial == "main" else "baseline"
    return TrialOpened(time=time, trial=trial, role=role, title=trial, tags={}, params={})


def window(time: float, *, step: int, new: int, ms: float, wait_ms: float = 0.0) -> Metrics:
    """A report of steps of which ``new`` had not been reported before."""
    points = [Point("train/loss", step - i, 1.0) for i in range(new)]
    points += [Point("time/step_ms", step, ms), Point("time/window_data_wait_ms", step, wait_ms)]
    return Metrics(time=time, step=step, epoch=1, points=tuple(points), steps=new)


def evaluated(time: float, *, step: int) -> Metrics:
    return Metrics(time=time, step=step, epoch=1, points=(Point("validation/loss", step, 1.0),))


def saved(time: float, *, step: int) -> CheckpointSaved:
    return CheckpointSaved(time=time, step=step, path="", seconds=0.1, blocked_seconds=0.1)


def trained(time: float) -> Trained:
    result = samples.finished("main", samples.spread(100.0)).result
    return Trained(time=time, result=result)


def seconds(*events: AnyEvent) -> dict[str, float]:
    goodput = WallClock("main", events).goodput
    assert goodput is not None
    return {use: pytest.approx(spent) for use, spent in goodput.seconds.items() if spent}


def test_each_second_of_an_undisturbed_training_has_a_name() -> None:
    events: Iterable[AnyEvent] = (
        opened(0), launched(2), FirstStep(time=9),
        window(20, step=10, new=10, ms=1000, wait_ms=100), evaluated(23, step=10),
        window(34, step=20, new=10, ms=1000, wait_ms=300), saved(33, step=10), evaluated(36, step=20),
        saved(37, step=20), trained(38), window(99, step=20, new=5, ms=1000),
    )  # fmt: skip
    # Ten seconds to the first step of the first window, and a second of saving before the second one.
    expected = {"start": 10, "input": 1 + 3, "steps": 9 + 7, "evaluation": 3 + 2, "saving": 1 + 2}
    assert seconds(*events) == expected
    assert sum(expected.values()) == 38


def test_measurements_before_and_after_are_no_part_of_the_training() -> None:
    baseline = (launched(2, trial="baseline"), window(50, step=10, new=10, ms=1000).model_copy(update={"trial": "b"}))
    main = (launched(60), window(75, step=10, new=10, ms=1000), trained(76))
    assert seconds(opened(0), *baseline, *main) == {"start": 2 + 5, "steps": 10, "saving": 1}


def test_of_a_killed_run_the_lost_steps_and_the_pause_are_told() -> None:
    killed = (
        opened(0), launched(0), FirstStep(time=6), window(15, step=10, new=10, ms=1000), saved(15.5, step=10),
        window(25, step=20, new=10, ms=1000), SystemMetrics(time=29, node="n", points=()),
    )  # fmt: skip
    # It goes on from step 10: steps 11 to 20 are done again, and have no points; four seconds of steps 21 and later
    # were never reported.
    resumed = (
        opened(DAY), launched(DAY + 1), Resumed(time=DAY + 5, step=10, epoch=0, checkpoint=""),
        FirstStep(time=DAY + 6), window(DAY + 21, step=24, new=4, ms=1000), trained(DAY + 22),
    )  # fmt: skip
    assert seconds(*killed, *resumed) == {
        "start": 5 + 6, "steps": 20 + 4, "redone": 4 + 11, "stopped": DAY - 29, "saving": 1
    }  # fmt: skip


def test_a_window_counts_with_its_new_steps_only() -> None:
    """Steps 11 to 20 are reported once more, the last two of them in a window with two new ones."""
    first = (opened(0), launched(0), FirstStep(time=1), window(20, step=20, new=20, ms=1000))
    again = (
        launched(22), Resumed(time=23, step=10, epoch=0, checkpoint=""), FirstStep(time=24),
        window(36, step=22, new=2, ms=1000), trained(36),
    )  # fmt: skip
    assert seconds(*first, *again) == {"start": 2, "stopped": 2, "steps": 20 + 2, "redone": 10}


def test_a_lost_worker_loses_the_steps_since_the_last_report() -> None:
    lost = Failed(time=27, rank=Rank(rank=1), error="gone", traceback="")
    first = (opened(0), launched(0), window(20, step=10, new=10, ms=1000), saved(21, step=10), lost)
    again = (launched(30), Resumed(time=33, step=10, epoch=0, checkpoint=""), window(45, step=20, new=10, ms=1000))
    # What is written in the background while steps go on is called saving where no report came after it.
    assert seconds(*first, *again, trained(45)) == {
        "start": 10 + 5, "steps": 20, "saving": 1, "redone": 6, "stopped": 3
    }  # fmt: skip


def test_an_interrupted_run_that_saved_at_its_end_has_lost_nothing() -> None:
    first = (opened(0), launched(0), window(20, step=10, new=10, ms=1000), saved(22, step=10))
    closed = RunClosed(time=23, status="KILLED", message="interrupted")
    again = (opened(50), launched(51), Resumed(time=53, step=10, epoch=0, checkpoint=""))
    rest = (window(70, step=20, new=10, ms=1000), trained(70))
    assert seconds(*first, closed, *again, *rest) == {"start": 10 + 10, "steps": 20, "saving": 2, "stopped": 28}


def test_a_run_that_was_stopped_before_its_first_launch_was_stopped_since() -> None:
    again = (opened(100), launched(101), window(112, step=10, new=10, ms=1000), trained(112))
    assert seconds(opened(0), *again) == {"stopped": 100, "start": 2, "steps": 10}


def test_reports_of_an_earlier_attempt_that_are_sent_again_take_no_time() -> None:
    first = (opened(0), launched(0), SystemMetrics(time=25, node="n", points=()))
    sent_again = (window(20, step=10, new=10, ms=1000), evaluated(22, step=10))
    again = (launched(30), Resumed(time=33, step=10, epoch=0, checkpoint=""), *sent_again)
    spent = seconds(*first, *again, window(45, step=20, new=10, ms=1000), trained(45))
    assert spent == {"start": 25 + 5, "stopped": 5, "steps": 10}


@pytest.mark.parametrize(
    "events", [(), (opened(0), launched(1)), (opened(0), launched(1), FirstStep(time=3), trained(4))]
)
def test_without_a_report_there_is_no_goodput(events: tuple[AnyEvent, ...]) -> None:
    assert WallClock("main", events).goodput is None


FIRST = (opened(0), launched(2), FirstStep(time=9), window(20, step=10, new=10, ms=1000), trained(21))


def test_a_finished_training_that_is_continued_has_the_time_of_both_without_the_pause() -> None:
    """The pause is no stop, as the training was over."""
    more = (
        opened(DAY),
        launched(DAY + 2),
        Resumed(time=DAY + 3, step=10, epoch=1, checkpoint="c"),
        window(DAY + 15, step=20, new=10, ms=1000),
    )
    assert seconds(*FIRST) == {"start": 10, "steps": 10, "saving": 1}
    assert seconds(*FIRST, *more, trained(DAY + 17)) == {"start": 15, "steps": 20, "saving": 3}


def test_a_finished_training_that_is_only_measured_again_has_the_time_that_it_had() -> None:
    again = (opened(DAY), launched(DAY + 2), Resumed(time=DAY + 3, step=10, epoch=1, checkpoint="c"))
    assert seconds(*FIRST, *again) == seconds(*FIRST)
    assert seconds(*FIRST, *again, trained(DAY + 17)) == seconds(*FIRST)


def test_percents_add_up_to_a_hundred_and_are_told_in_one_sentence() -> None:
    goodput = Goodput(seconds={"steps": 200.4, "start": 33.4, "input": 33.4, "saving": 32.8, "evaluation": 0.4})
    assert goodput.sentence == (
        "Goodput 67%: 3 min 20 s of 5 min 0 s were spent in training steps (startup 11%, data loading 11%, "
        "checkpointing 11%)."
    )
    assert sum(goodput.figures.values()) == pytest.approx(1)
    assert goodput.figures["goodput"] == pytest.approx(200.4 / 300.4)
    assert set(goodput.figures) == {
        "goodput",
        *("badput/startup", "badput/data_loading", "badput/evaluation", "badput/checkpointing"),
        *("badput/lost_progress", "badput/downtime"),
    }


def test_an_evaluation_between_two_sessions_takes_no_time_of_the_training() -> None:
    before = (opened(0), launched(2), FirstStep(time=9), window(20, step=10, new=10, ms=1000), saved(20.5, step=10))
    evaluation = launched(500, trial="evaluation")
    after = (opened(1000), launched(1001), FirstStep(time=1003), window(1014, step=20, new=10, ms=1000), trained(1015))
    assert seconds(*before, evaluation, *after) == seconds(*before, *after)
