"""Where a training's wall clock went, on journals whose seconds can be counted by hand."""

# promise: where a training's wall clock goes, every second with one name

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
from pipeline.protocol.trial import Rank
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
    return CheckpointSaved(time=time, step=step, path="", seconds=0.1)


def trained(time: float) -> Trained:
    return Trained(time=time, result=samples.finished("main", samples.spread(100.0)).result)


def resumed(time: float) -> Resumed:
    """Continued from step 10."""
    return Resumed(time=time, step=10, epoch=0, checkpoint="")


def seconds(*events: AnyEvent) -> dict[str, float]:
    goodput = WallClock("main", events).goodput
    assert goodput is not None
    return {use: pytest.approx(spent) for use, spent in goodput.seconds.items() if spent}


BASELINE = (launched(2, trial="baseline"), window(50, step=10, new=10, ms=1000).model_copy(update={"trial": "b"}))
LOST = Failed(time=27, rank=Rank(rank=1), error="gone", traceback="")
KILLED = RunClosed(time=23, status="KILLED", message="interrupted")
SHORT = (opened(0), launched(0), window(20, step=10, new=10, ms=1000))
"""A run whose first window begins with its first step, after ten seconds."""
FIRST = (opened(0), launched(2), FirstStep(time=9), window(20, step=10, new=10, ms=1000), trained(21))
AGAIN = (opened(DAY), launched(DAY + 2), resumed(DAY + 3))
BEFORE = (*FIRST[:-1], saved(20.5, step=10))
AFTER = (opened(1000), launched(1001), FirstStep(time=1003), window(1014, step=20, new=10, ms=1000), trained(1015))
JOURNALS: dict[str, tuple[tuple[AnyEvent, ...], dict[str, float]]] = {
    # Ten seconds to the first step of the first window, and a second of saving before the second one.
    "undisturbed": (
        (opened(0), launched(2), FirstStep(time=9),
         window(20, step=10, new=10, ms=1000, wait_ms=100), evaluated(23, step=10),
         window(34, step=20, new=10, ms=1000, wait_ms=300), saved(33, step=10), evaluated(36, step=20),
         saved(37, step=20), trained(38), window(99, step=20, new=5, ms=1000)),
        {"start": 10, "input": 1 + 3, "steps": 9 + 7, "evaluation": 3 + 2, "saving": 1 + 2},
    ),
    "measurements before and after": (
        (opened(0), *BASELINE, launched(60), window(75, step=10, new=10, ms=1000), trained(76)),
        {"start": 2 + 5, "steps": 10, "saving": 1},
    ),
    # It goes on from step 10: steps 11 to 20 are done again, and have no points; four seconds of later steps were never
    # reported.
    "killed": (
        (opened(0), launched(0), FirstStep(time=6), window(15, step=10, new=10, ms=1000), saved(15.5, step=10),
         window(25, step=20, new=10, ms=1000), SystemMetrics(time=29, node="n", points=()),
         opened(DAY), launched(DAY + 1), resumed(DAY + 5), FirstStep(time=DAY + 6),
         window(DAY + 21, step=24, new=4, ms=1000), trained(DAY + 22)),
        {"start": 5 + 6, "steps": 20 + 4, "redone": 4 + 11, "stopped": DAY - 29, "saving": 1},
    ),
    # Steps 11 to 20 are reported once more, the last two of them in a window with two new ones.
    "only new steps of a window count": (
        (opened(0), launched(0), FirstStep(time=1), window(20, step=20, new=20, ms=1000),
         launched(22), resumed(23), FirstStep(time=24), window(36, step=22, new=2, ms=1000), trained(36)),
        {"start": 2, "stopped": 2, "steps": 20 + 2, "redone": 10},
    ),
    # What is written in the background while steps go on is called saving where no report came after it.
    "a lost worker loses the steps since the last report": (
        (*SHORT, saved(21, step=10), LOST, launched(30), resumed(33), window(45, step=20, new=10, ms=1000),
         trained(45)),
        {"start": 10 + 5, "steps": 20, "saving": 1, "redone": 6, "stopped": 3},
    ),
    "interrupted, saved at its end": (
        (*SHORT, saved(22, step=10), KILLED, opened(50), launched(51), resumed(53),
         window(70, step=20, new=10, ms=1000), trained(70)),
        {"start": 10 + 10, "steps": 20, "saving": 2, "stopped": 28},
    ),
    "stopped before its first launch": (
        (opened(0), opened(100), launched(101), window(112, step=10, new=10, ms=1000), trained(112)),
        {"stopped": 100, "start": 2, "steps": 10},
    ),
    "reports of an earlier attempt are sent again": (
        (opened(0), launched(0), SystemMetrics(time=25, node="n", points=()), launched(30), resumed(33),
         window(20, step=10, new=10, ms=1000), evaluated(22, step=10), window(45, step=20, new=10, ms=1000),
         trained(45)),
        {"start": 25 + 5, "stopped": 5, "steps": 10},
    ),
    "completed": (FIRST, {"start": 10, "steps": 10, "saving": 1}),
    # The pause is no stop, as the training was over.
    "completed, then continued": (
        (*FIRST, *AGAIN, window(DAY + 15, step=20, new=10, ms=1000), trained(DAY + 17)),
        {"start": 15, "steps": 20, "saving": 3},
    ),
    "completed, then being measured again": ((*FIRST, *AGAIN), {"start": 10, "steps": 10, "saving": 1}),
    "completed, then measured again": ((*FIRST, *AGAIN, trained(DAY + 17)), {"start": 10, "steps": 10, "saving": 1}),
    "an evaluation between two sessions takes no time": (
        (*BEFORE, launched(500, trial="evaluation"), *AFTER),
        {"start": 10 + 3, "steps": 20, "saving": 1.5, "redone": 1, "stopped": 979.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOURNALS)
def test_each_second_of_a_training_has_one_name(name: str) -> None:
    events, expected = JOURNALS[name]
    assert seconds(*events) == expected


@pytest.mark.parametrize(
    "events", [(), (opened(0), launched(1)), (opened(0), launched(1), FirstStep(time=3), trained(4))]
)
def test_without_a_report_there_is_no_goodput(events: tuple[AnyEvent, ...]) -> None:
    assert WallClock("main", events).goodput is None


def test_percents_add_up_to_a_hundred_and_are_told_in_one_sentence() -> None:
    goodput = Goodput(seconds={"steps": 200.4, "start": 33.4, "input": 33.4, "saving": 32.8, "evaluation": 0.4})
    assert goodput.sentence == (
        "Goodput 67%: 3 min 20 s of 5 min 0 s were spent in training steps (startup 11%, data loading 11%, "
        "checkpointing 11%)."
    )
    shares = {fact.key: fact.value or 0.0 for fact in goodput.facts}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["goodput"] == pytest.approx(200.4 / 300.4)
    assert set(shares) == {
        "goodput",
        *("badput/startup", "badput/data_loading", "badput/evaluation", "badput/checkpointing"),
        *("badput/lost_progress", "badput/downtime"),
    }
