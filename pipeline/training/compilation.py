"""torch.compile: what is compiled, when, and how long it takes.

Each part's ``forward`` is compiled in place, so names, hooks and wrappers of strategies stay as they are. It is all
done before the first step, on batches of the sizes that training has, so that no measurement has a compiler in it.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.config.train import Compile
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Phase
from pipeline.training.watch import mark

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

_KEY = "train.compile"
_SIZES = 64
"""Of inputs. Torch gives up after 8 and goes on without compiling; predictions and batch sizes are measured at more."""


class Stopwatch:
    """How long this process has spent compiling."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def start(self, _: "CallbackArgs") -> None:
        """A compiler starts, which may take longer than any batch."""
        mark(Phase.BUILDING)
        self._since = time.perf_counter()

    def stop(self, _: "CallbackArgs") -> None:
        """No compiler is running any more."""
        self.seconds += time.perf_counter() - self._since


def compile_parts(
    parts: Iterable[nn.Module], how: Compile, *, device: torch.device, threads: int, overlaps: bool
) -> Stopwatch:
    """Have modules compiled when they are called; the stopwatch runs meanwhile.

    Args:
        parts: the modules, changed in place.
        how: the experiment's.
        device: where they compute.
        threads: compilers that may run side by side.
        overlaps: whether to cut the graph where DistributedDataParallel's buckets are full.

    Raises:
        ExperimentError: there is no C++ compiler.
    """
    # These take seconds to import, and only those who compile need them.
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.callback import callback_handler
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            message = "needs a C++ compiler on CPU, and this node has none; install g++, or name yours in CXX"
            raise ExperimentError.of(_KEY, message) from error
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
    """What the compiler can't do, in words.

    Raises:
        ExperimentError: in place of the compiler's own.
    """
    if how is None:
        yield
        return
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except FailOnRecompileLimitHit as error:
        message = f"inputs have more than {_SIZES} sizes, and each is compiled; write train.compile: {{dynamic: true}}"
        raise ExperimentError.of(_KEY, message) from error
    except TorchDynamoException as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        message = f"torch can't compile this model: {said[:300]}; the rank's log has more; write train.compile: false"
        raise ExperimentError.of(_KEY, message) from error
