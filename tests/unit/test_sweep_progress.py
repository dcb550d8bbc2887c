"""Progress of a sweep as a whole: what its bar and its lines say, at any width, and what is left by the clock."""

# promise: `sweep`; its progress

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pipeline.commands.study_trials.sweep_progress import SweepProgress, is_live, shown_on
from pipeline.report.swept import State, SweptTrial

LR = "optimizer.lr"


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(*, total: int = 4, clock: Clock | None = None, direction: str = "min") -> SweepProgress:
    return SweepProgress(
        total=total, epochs=10, metric="validation/loss", direction="min" if direction == "min" else "max",
        clock=clock or Clock(),
    )  # fmt: skip


def note(
    found: SweepProgress, number: int, state: State, *, epochs: int = 0, value: float | None = None, **values: Any
) -> None:
    found.update(
        SweptTrial(number=number, values=values or {LR: number / 10}, state=state, epochs=epochs, value=value, run="")
    )


def under_way() -> SweepProgress:
    """Of four trials one has finished, one was stopped, one is running."""
    clock = Clock()
    found = progress(clock=clock)
    for number in (1, 2):
        note(found, number, "running")
    clock.now = 30
    found.evaluated(1, epoch=10, value=0.5)
    found.evaluated(2, epoch=2, value=2.25)
    note(found, 1, "finished", epochs=10, value=0.5)
    note(found, 2, "stopped early", epochs=2, value=2.25)
    values: dict[str, Any] = {LR: 0.3, "model.hidden": [32, 32]}
    note(found, 3, "running", **values)
    clock.now = 60
    found.evaluated(3, epoch=4, value=0.25)
    return found


def test_a_line_says_how_far_the_sweep_is_what_is_best_and_what_is_left() -> None:
    # 2.4 of 4 trials in 60 s: 40 s for the others
    assert under_way().line == (
        "2 of 4 done, 1 running, 1 stopped early; best so far: validation/loss 0.25 in trial 3; about 0:40 left"
    )


def test_between_trials_it_says_what_is_starting() -> None:
    found = under_way()
    found.slots = 2
    assert found.counts == "2 of 4 done, 1 running, 1 starting, 1 stopped early"
    assert drawn(found, width=80)[-1].strip() == "starting 1 training"
    note(found, 4, "running")
    assert found.counts == "2 of 4 done, 1 running, 1 starting, 1 stopped early"
    assert drawn(found, width=80)[-1].strip() == "trial 4: starting (lr=0.4)"


def test_the_best_follows_the_direction_and_leaves_out_failures_and_nan() -> None:
    found = progress(direction="max")
    assert found.best == ""
    for number, value in ((1, 0.5), (2, float("nan")), (3, 0.75)):
        note(found, number, "running")
        found.evaluated(number, epoch=1, value=value)
    assert "0.75 in trial 3" in found.best
    note(found, 3, "failed", value=0.75)
    assert "0.5 in trial 1" in found.best
    assert "1 failed" in found.counts


def test_an_interrupted_trial_is_not_done() -> None:
    found = under_way()
    note(found, 3, "interrupted", epochs=4, value=0.25)
    assert found.counts == "2 of 4 done, 1 starting, 1 stopped early"
    assert found.fraction == 0.5


def test_what_is_left_counts_this_session_only() -> None:
    clock = Clock()
    found = progress(clock=clock)
    note(found, 1, "finished", epochs=10, value=0.5)
    note(found, 2, "running", epochs=5, value=0.75)  # half of it is done
    assert found.left_s is None
    clock.now = 50
    found.evaluated(2, epoch=10, value=0.5)
    # half a trial in 50 s; two are left
    assert found.left_s == pytest.approx(200)
    note(found, 2, "finished", epochs=10, value=0.5)
    for number in (3, 4):
        note(found, number, "running")
        note(found, number, "finished", epochs=10, value=0.5)
    assert (found.left_s, found.left) == (0, "")


def drawn(found: SweepProgress, *, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_the_bar_fits_its_terminal(width: int) -> None:
    head, best, *running = drawn(under_way(), width=width)
    assert head.startswith("sweep: 2 of 4 done, 1 running, 1 stopped early")
    assert head.rstrip().endswith("about 0:40 left")
    assert best.strip().startswith("best so far: validation/loss 0.25 in trial 3")
    assert [row.strip() for row in running] == [
        "trial 3: epoch 4/10, validation/loss 0.25 (lr=0.3, hidden=[32, 32])"
    ]  # fmt: skip
    assert all(len(line) <= width for line in (head, best, *running))


def test_many_running_trials_are_counted() -> None:
    found = progress(total=100)
    values: dict[str, Any] = {LR: 0.1, "model.hidden": ["x" * 200]}
    for number in range(1, 13):
        note(found, number, "running", **values)
    lines = drawn(found, width=80)
    assert lines[-1].strip() == "and 4 other trainings"
    assert len(lines) == 10
    assert all(len(line) <= 80 for line in lines)


def test_a_pipe_gets_no_bar() -> None:
    pipe = Console(file=StringIO(), width=80)
    assert not is_live(pipe)
    with shown_on(pipe, under_way()):
        pipe.print("a line")
    assert isinstance(pipe.file, StringIO)
    assert pipe.file.getvalue() == "a line\n"
