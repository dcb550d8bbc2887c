"""torch.compile for real: the same losses, no compiler in what is timed, and its errors in words.

On a machine that has compiled these models before, torch's cache in the temporary directory makes this much faster.
"""

from typing import Any

import pytest
import torch

from pipeline.training.meters.clock import Clock
from pipeline.training.model.compilation import Stopwatch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Compiled code, callbacks and settings of the compiler don't outlive a test."""
    yield
    import torch._dynamo
    import torch._dynamo.callback

    torch._dynamo.callback.callback_handler.clear()
    torch._dynamo.reset()


class TestTheClock:
    def test_leaves_out_what_a_compiler_has_disturbed(self) -> None:
        stopwatch = Stopwatch()
        clock = Clock(device=torch.device("cpu"), warmup_steps=0, compiling=stopwatch)
        clock.resume()
        told = []
        for seconds in (0.0, 1.5, 0.0):
            stopwatch.seconds += seconds
            told.append(clock.has_compiled)
            clock.count(clock.lap(steps=1, samples=8), is_disturbed=clock.has_compiled)

        assert told == [False, True, False]
        assert len(clock.laps) == len(clock.steady) == 2

    def test_has_nothing_to_do_with_what_was_compiled_in_between(self) -> None:
        stopwatch = Stopwatch()
        clock = Clock(device=torch.device("cpu"), warmup_steps=0, compiling=stopwatch)
        stopwatch.seconds = 1.5  # an evaluation, say
        clock.resume()
        assert not clock.has_compiled
