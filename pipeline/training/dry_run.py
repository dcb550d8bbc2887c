"""Forward and backward passes that leave nothing behind, before the first step or before a state is restored."""

from collections.abc import Iterable

from pipeline.training.context import TrainContext
from pipeline.training.order import MicroBatch
from pipeline.training.step import gradients


def rehearse(context: TrainContext, *, with_last: bool = False) -> None:
    """Take the gradients of the first step and forget them; also of an epoch's last, smaller one. Collective."""
    buffers = [buffer.clone() for buffer in context.whole.buffers()]  # some are in no checkpoint
    context.wrapped.train()
    micro_batches = _steps(context.micro_batches(0))
    chosen = [micro_batches[0], micro_batches[-1]] if with_last and len(micro_batches) > 1 else [micro_batches[0]]
    stream = context.train_loader.batches([micro_batch for step in chosen for micro_batch in step])
    for _ in chosen:
        gradients(context, stream)
        context.optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(context.whole.buffers(), buffers, strict=True):
        buffer.copy_(before)


def compile_ahead(context: TrainContext) -> None:
    """Meet all sizes of training batches before the first step, so that nothing is compiled later. Collective."""
    if context.compiling is None:
        return
    memory = context.strategy.state_dict()
    rehearse(context, with_last=context.steps >= context.order.steps_per_epoch)
    context.strategy.set_step(steps=0)
    if memory is not None:
        context.strategy.load_state_dict(memory)


def _steps(micro_batches: Iterable[MicroBatch]) -> list[list[MicroBatch]]:
    """Draws by the step that they belong to."""
    steps: list[list[MicroBatch]] = [[]]
    for micro_batch in micro_batches:
        steps[-1].append(micro_batch)
        if micro_batch.is_last:
            steps.append([])
    return steps[:-1]
