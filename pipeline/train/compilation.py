"""torch.compile of a model's parts, before the first step, and the time that it takes.

Each part's ``forward`` is compiled in place, which leaves names, hooks and wrappers of strategies unchanged. All batch
sizes of the training are compiled before the first step, so that no measurement includes a compilation.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from pipeline.errors import ExperimentError
from pipeline.experiment.train import Compile
from pipeline.protocol.events import Phase
from pipeline.train.watch import mark

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

_KEY = "train.compile"
_SIZES = 64  # Sizes of inputs that may be compiled; torch's own limit of 8 is too few to predict a speedup


class Stopwatch:
    """Seconds that this process has spent compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def start(self, _: "CallbackArgs") -> None:
        """Start timing."""
        mark(Phase.BUILDING)  # in which the watchdog allows any duration
        self._since = time.perf_counter()

    def stop(self, _: "CallbackArgs") -> None:
        """Stop timing."""
        self.seconds += time.perf_counter() - self._since


def compile_parts(
    parts: Iterable[nn.Module],
    how: Compile,
    *,
    threads: int,
    overlaps: bool,
    keeps_compiled: bool = False,
) -> Stopwatch:
    """Compile modules in place at their first call, and return the stopwatch of these compilations.

    ``overlaps`` splits the graph at the buckets of DistributedDataParallel, to overlap communication. With
    ``keeps_compiled`` an earlier trial of this process keeps its compiled code, as it is still to take steps.
    """
    # These imports take seconds.
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.callback import callback_handler

    if not keeps_compiled:
        torch._dynamo.reset()  # of an earlier trial in this process
    torch._dynamo.config.recompile_limit = _SIZES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.optimize_ddp = overlaps
    torch._inductor.config.compile_threads = threads
    stopwatch = Stopwatch()
    callback_handler.register_start_callback(stopwatch.start)
    callback_handler.register_end_callback(stopwatch.stop)
    compiled = partial(torch.compile, mode=how.mode, dynamic=how.dynamic, fullgraph=how.fullgraph)
    for part in parts:
        part.forward = compiled(part.forward)
    return stopwatch


@contextmanager
def explained(how: Compile | None) -> Iterator[None]:
    """Translate the compiler's exceptions in the block into ExperimentErrors that say what to write."""
    if how is None:
        yield
        return
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except FailOnRecompileLimitHit as error:
        message = f"inputs have more than {_SIZES} shapes, and each is compiled separately"
        raise ExperimentError.of(_KEY, f"{message}; set train.compile: {{dynamic: true}}") from error
    except TorchDynamoException as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        remedy = "Set train.compile: false, or find the cause in the rank's log."
        raise ExperimentError.of(_KEY, f"torch can't compile this model: {said[:300]}. {remedy}") from error
