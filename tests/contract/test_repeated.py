"""``pipeline run --again RUN``: the same run, what differs, and from which step on."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.commands.repetition import describe_losses

Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([1.0, math.nan], [1.0, math.nan], "same losses to the bit in all 2 steps"),
        ([0.5, 0.0], [0.5, -0.0], "losses differ from step 2 of 2: -0.0, was 0.0 in A"),
        ([0.5, 0.1], [0.5], "same losses to the bit in the first 1 step; A has 2, this run 1"),
        ([], [0.5], "no losses to compare: A has none"),
    ],
)
def test_the_first_step_that_differs_is_named(before: list[float], now: list[float], said: str) -> None:
    assert describe_losses(before, now, earlier="A") == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--again", "latest", "seed=3"], "--again latest: repeats the run as it was. Remove the file, the overrides"),
        (["--again", "no-such-run"], "--again no-such-run: no such run in runs"),
        ([], "no file is named. Write pipeline run FILE, or pipeline run --again RUN."),
    ],
)
def test_what_is_no_repetition_is_refused(words: list[str], said: str, command: Command) -> None:
    ended = command("run", *words)
    assert ended.code == 2
    assert said in ended.stderr
