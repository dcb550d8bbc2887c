"""Numbers that a model keeps in attributes and changes in training, such as a counter: checkpoints don't have them."""

from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.trial import Training
from pipeline.training.context import TrainContext
from pipeline.training.parameter_names import listed


def note(context: TrainContext) -> None:
    """Note the numbers after the first step, in which a model may set some for good, such as the size of its images."""
    trial = context.trial
    # A task with hooks for each step sets what it counts itself.
    if context.rank.is_first and isinstance(trial, Training) and trial.saves and context.in_steps is None:
        context.numbers = _numbers(context)


def warn(context: TrainContext, outbox: Outbox) -> None:
    """Warn, after the second step, of numbers that it has changed."""
    now = _numbers(context) if context.numbers else {}
    changed = [name for name, value in context.numbers.items() if now.get(name) != value and value == value]
    if changed:
        message = (
            f"model: each step changes the attribute {listed(changed)}, which checkpoints don't have: a resumed "
            "training begins with its first value. If it matters to the training, keep it in a buffer"
        )
        outbox.event(Warned(trial=context.trial.name, message=message))


def _numbers(context: TrainContext) -> dict[str, float]:
    return {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in context.model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (int, float)
    }
