"""Steps of a training: its functions are put together once, after the first batch."""

from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Phase
from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.batches.rank_batches import MicroBatches
from pipeline.training.context import TrainContext
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.ranks.watch import mark
from pipeline.training.step.explained_errors import explain
from pipeline.training.step.forward import forward
from pipeline.training.step.plain import Parts, Stepped, plain_parts, plain_step


def train_step(training: TrainContext, stream: MicroBatches, *, step: int) -> Stepped:
    """Train on this rank's next micro-batches and update the weights once.

    Args:
        training: the model, the optimizer and how they are trained.
        stream: micro-batches of this rank; those of one step are taken from it.
        step: number of this step, counted from 0.
    """
    if (take := training.assembled.get("update")) is not None:
        return take(step, stream)  # type: ignore[no-any-return]
    stepped = _assemble(training, "update", exchanges=True, updates=True)(step, stream)
    if not isinstance(getattr(stepped, "has_updated", None), bool):
        message = "a function of the step returned nothing; return what parts.update or parts.step returned"
        raise ExperimentError.of("features", message)
    return stepped  # type: ignore[no-any-return]


def compute_gradients(training: TrainContext, stream: MicroBatches, *, exchanges: bool = True, step: int = 0) -> Tensor:
    """Compute the gradients of a step, leave them in the model, and return `Stepped.loss`.

    Without ``exchanges`` ranks send each other nothing.
    """
    name = "gradients" if exchanges else "own gradients"
    take = training.assembled.get(name) or _assemble(training, name, exchanges=exchanges, updates=False)
    return take(step, stream).loss  # type: ignore[no-any-return]


def _assemble(training: TrainContext, name: str, *, exchanges: bool, updates: bool) -> Any:
    """Put the functions of a step together: the plain ones, with the training's features around them."""
    is_known = training.seen.log_names is not None
    parts = plain_parts(training, exchanges=exchanges)
    if not is_known and not training.experiment.optimizers:  # whose step checks each output
        parts = parts._replace(forward=partial(_forward_first, training), step=_first_step)
    parts = _with_gradients(parts, training)
    if updates:
        for feature in training.features:
            parts = _checked(feature.around_update(parts), feature, "around_update")
    else:
        parts = parts._replace(update=_keep_gradients)
    step = partial(parts.step, parts, training)
    if is_known:
        training.assembled[name] = step
    return step


def _with_gradients(parts: Parts, training: TrainContext) -> Parts:
    for feature in training.features:
        parts = _checked(feature.around_gradients(parts), feature, "around_gradients")
    return parts


def _checked(parts: object, feature: Any, hook: str) -> Parts:
    """Return what a feature returned, if it is functions of a step.

    Raises:
        ExperimentError: it is something else.
    """
    if not isinstance(parts, Parts):
        kind = type(feature)
        message = f"{kind.__module__}.{kind.__qualname__}.{hook} returned {type(parts).__name__}"
        raise ExperimentError.of("features", f"{message}; return its argument, or a copy with other functions")
    return parts


def _first_step(parts: Parts, training: TrainContext, step: int, micro_batches: MicroBatches) -> Stepped:
    """Take the first step, whose first output decides which functions all steps have.

    This output is checked by `forward`, and then passed on to the plain step.
    """
    mark(Phase.READING)
    micro_batch, batch = next(micro_batches)
    parts.seed(step=step, number=0)
    mark(Phase.FORWARD)
    try:
        with parts.sending(micro_batch):
            outputs = [parts.forward(micro_batch, batch)]
    except Exception as error:
        explain(error, training, batch, micro_batch)
        raise
    known = _with_gradients(plain_parts(training, exchanges=parts.exchanges), training)

    def pass_on(micro_batch: MicroBatch, batch: Any) -> StepOutput:
        return outputs.pop() if outputs else known.forward(micro_batch, batch)

    def seed_others(*, step: int, number: int) -> None:
        if number:
            parts.seed(step=step, number=number)

    chosen = parts._replace(
        seed=seed_others, forward=pass_on, weigh=known.weigh, value=known.value, complete=known.complete
    )
    return plain_step(chosen, training, step, chain([(micro_batch, batch)], micro_batches))


def _forward_first(training: TrainContext, _: MicroBatch, batch: Any) -> StepOutput:
    return forward(training, training.wrapped, batch)


def _keep_gradients(_: int, __: ParameterSet) -> bool:
    return False
