"""NVTX ranges around the phases of each step, which Nsight Systems shows above the kernels of a GPU.

The exchange overlaps the backward pass. Its range is that of the host: from the first gradient of a backward pass that
ends with an exchange until that pass returns. NCCL marks its kernels itself.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.cuda import nvtx

from pipeline.protocol.events import Outbox, Phase, Warned
from pipeline.training.context import TrainContext
from pipeline.training.ranks.watch import heard

_NAMES: Mapping[Phase, str] = {
    Phase.BUILDING: "build",
    Phase.READING: "input",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.UPDATING: "optimizer",
    Phase.REPORTING: "report",
    Phase.EVALUATING: "evaluation",
    Phase.SAVING: "checkpoint",
    Phase.WAITING: "other ranks",
    Phase.ENDED: "end",
}


def annotated(context: TrainContext, outbox: Outbox) -> AbstractContextManager[None]:
    """Return a context in which the training has ranges, if ``benchmark.nvtx`` asks for them and torch has NVTX."""
    if not context.experiment.benchmark.nvtx:
        return nullcontext()
    try:
        nvtx.mark("pipeline")  # type: ignore[no-untyped-call]
    except RuntimeError:
        if context.rank.is_first:
            message = "benchmark.nvtx has no effect, since this torch was built without CUDA"
            outbox.event(Warned(time=time.time(), trial=context.trial.name, message=message))
        return nullcontext()
    return _annotated(context)


@contextmanager
def _annotated(context: TrainContext) -> Iterator[None]:
    ranges = _Ranges()

    def note(_: Tensor) -> None:
        if getattr(context.wrapped, "require_backward_grad_sync", True):  # False in DDP's no_sync
            ranges.begin_exchange()

    with heard(ranges):
        hook = register_multi_grad_hook(context.parameters, note, mode="any") if context.rank.world_size > 1 else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
            ranges.close()


class _Ranges:
    """The open ranges of this rank: a step, a phase inside it, and the exchange."""

    def __init__(self) -> None:
        self._in_step = self._in_phase = False
        self._exchange: int | None = None

    def begin_step(self, step: int) -> None:
        """Begin a step, counted from 1."""
        self.close()
        nvtx.range_push(f"step {step}")  # type: ignore[no-untyped-call]
        self._in_step = True

    def enter(self, phase: Phase) -> None:
        """End the phase before, and the step if the new phase comes after it."""
        self._end_phase()
        if phase > Phase.UPDATING:
            self.close()
        nvtx.range_push(_NAMES[phase])  # type: ignore[no-untyped-call]
        self._in_phase = True

    def begin_exchange(self) -> None:
        """Begin the exchange, which ends with the phase."""
        if self._exchange is None:
            self._exchange = nvtx.range_start("exchange")

    def close(self) -> None:
        """End the phase and the step."""
        self._end_phase()
        if self._in_step:
            nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._in_step = False

    def _end_phase(self) -> None:
        if self._exchange is not None:
            nvtx.range_end(self._exchange)
        if self._in_phase:
            nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._exchange, self._in_phase = None, False
