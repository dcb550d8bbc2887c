"""Forward and backward passes that leave nothing behind, before the first step or before a state is restored."""

from collections.abc import Iterable

from pipeline.training.order import Draw
from pipeline.training.setup import Setup
from pipeline.training.step import gradients


def rehearse(setup: Setup, *, with_last: bool = False) -> None:
    """Take the gradients of the first step and forget them; also of an epoch's last, smaller one. Collective."""
    buffers = [buffer.clone() for buffer in setup.whole.buffers()]  # some are in no checkpoint
    setup.wrapped.train()
    draws = _steps(setup.draws(0))
    chosen = [draws[0], draws[-1]] if with_last and len(draws) > 1 else [draws[0]]
    stream = setup.train_loader.batches([draw for step in chosen for draw in step])
    for _ in chosen:
        gradients(setup, stream)
        setup.optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(setup.whole.buffers(), buffers, strict=True):
        buffer.copy_(before)


def compile_ahead(setup: Setup) -> None:
    """Meet all sizes of training batches before the first step, so that nothing is compiled later. Collective."""
    if setup.compiling is None:
        return
    memory = setup.strategy.memory()
    rehearse(setup, with_last=setup.steps >= setup.order.steps_per_epoch)
    setup.strategy.go_on(steps=0)
    if memory is not None:
        setup.strategy.remember(memory)


def _steps(draws: Iterable[Draw]) -> list[list[Draw]]:
    """Draws by the step that they belong to."""
    steps: list[list[Draw]] = [[]]
    for draw in draws:
        steps[-1].append(draw)
        if draw.is_last:
            steps.append([])
    return steps[:-1]
