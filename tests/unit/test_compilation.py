"""No compiler is in what is timed."""

import torch

from pipeline.train.clock import Clock
from pipeline.train.compilation import Stopwatch


def test_the_clock_leaves_out_what_a_compiler_has_disturbed() -> None:
    stopwatch = Stopwatch()
    clock = Clock(device=torch.device("cpu"), warmup_steps=0, compiling=stopwatch)
    stopwatch.seconds = 1.5  # before the lap, in an evaluation, say
    clock.resume()
    told = []
    for seconds in (0.0, 1.5, 0.0):
        stopwatch.seconds += seconds
        told.append(clock.has_compiled)
        clock.count(clock.lap(steps=1, samples=8), is_disturbed=clock.has_compiled)
    assert told == [False, True, False]
    assert len(clock.laps) == len(clock.steady) == 2
