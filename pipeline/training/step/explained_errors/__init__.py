"""Errors of the experiment's model, task and loss, explained with shapes, types and what to write instead.

torch's words name no tensor, no parameter and no key of the experiment. Each rule recognizes one kind of error by its
type, its text or the frames that it comes from. What no rule recognizes is raised as it is.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch import nn
from torch.nn.functional import batch_norm

from pipeline.errors import ExperimentError
from pipeline.tasks import Supervised
from pipeline.tasks.from_model import described
from pipeline.training.batches.order import MicroBatch
from pipeline.training.context import TrainContext
from pipeline.training.model.parameter_names import listed
from pipeline.training.ranks.torch_errors import is_from_torch
from pipeline.training.step.explained_errors import losses

_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""Error of DDP about parameters without a gradient, and where it counts them, among those that require one."""
_TWICE = "Expected to mark a variable ready only once"
_TWICE_INDEX = re.compile(r"Parameter at index (\d+)")
"""Error of DDP about a parameter that gets two gradients in one backward pass, and where it counts it."""
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(.*?)'")

_OTHER_TYPE = "the inputs and weights of a layer have different types; return inputs.float() from the dataset"
_HINTS = (
    (
        "device-side assert",
        "an index is out of range on the GPU, usually a target that is not a class; use parallel.device=cpu to see it",
    ),
    ("index out of range in self", "an embedding got an index out of range; compare the index with num_embeddings"),
    (
        "but expected Float",
        "the targets and the model's outputs have different types; return targets.float() from the dataset",
    ),
    ("must have the same dtype, but got", _OTHER_TYPE),  # linear layers
    ("mixed dtype", _OTHER_TYPE),  # normalization
    ("and bias type", _OTHER_TYPE),  # convolutions
    ("and weight type", _OTHER_TYPE),
)
"""Texts of torch that name no tensor of the user, and what they mean."""


@contextmanager
def explained(context: TrainContext, batch: object = None) -> Iterator[None]:
    """Explain errors of the block.

    Args:
        context: what is trained.
        batch: the collated batch in a forward pass, the `MicroBatch` in a training step.

    Raises:
        ExperimentError: a rule recognizes the error.
    """
    try:
        yield
    except Exception as error:
        explain(error, context, batch)
        raise


def explain(error: Exception, context: TrainContext, *batches: object) -> None:
    """Raise the explanation of an error, if a rule recognizes it; see `explained` for what ``batches`` may be.

    Raises:
        ExperimentError: a rule recognizes the error.
    """
    if isinstance(error, ExperimentError):
        return
    for rule in _RULES:
        for batch in batches:
            if (explanation := rule(error, context, batch)) is not None:
                raise explanation from error


def hint(error: BaseException) -> str:
    """Return the layer that an error of torch is from, and what a usual one means; empty for those of user code."""
    if not isinstance(error, RuntimeError | IndexError) or not is_from_torch(error):
        return ""
    return _find_layer(error) + next((f"; {meaning}" for text, meaning in _HINTS if text in str(error)), "")


def _find_layer(error: BaseException) -> str:
    """Return the name and the arguments of the layer whose ``forward`` failed; empty if none did."""
    callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [each for each in callers if isinstance(each, nn.Module)]
    if not modules or any(modules[-1].children()):
        return ""
    name = next((name for name, each in modules[0].named_modules() if each is modules[-1]), "")
    return f"; in layer {name.removeprefix('module.')}: {modules[-1]}" if name else f"; in {modules[-1]}"


def loss_error(context: TrainContext, message: str) -> ExperimentError:
    """Make the error that the experiment's task, or else its loss, is wrong."""
    return ExperimentError.of("task" if context.experiment.task else "loss", message)


def _explain_loss(error: Exception, context: TrainContext, _: Any) -> ExperimentError | None:
    message = losses.explain(error)
    return loss_error(context, message) if message else None


def _explain_unused_parameters(error: Exception, context: TrainContext, _: Any) -> ExperimentError | None:
    """Name the parameters that DDP waited for in the step before, as far as it names them."""
    if not _is_of_ddp(error, _UNUSED):
        return None
    known, found = list(context.built.trainable), _INDICES.search(str(error))
    names = [known[int(index)] for index in found[1].split()] if found else []
    if frozen := [name for name, one in context.model.named_parameters() if name in names and not one.requires_grad]:
        return ExperimentError.of(
            "parallel.options.find_unused_parameters",
            f"is false, but requires_grad of {listed(frozen)} was set to False after training started. Set "
            "find_unused_parameters: true, or freeze the parameters from the start with train.freeze.",
        )
    said = listed(names) if names else "a parameter"
    return ExperimentError.of(
        "parallel.options.find_unused_parameters",
        f"is false, but {said} got no gradient in a step on rank {context.rank.rank}. Set it to true if the model uses "
        "the parameters in some batches only. Otherwise remove them, or freeze them with train.freeze.",
    )


def _explain_double_gradients(error: Exception, context: TrainContext, _: Any) -> ExperimentError | None:
    """Name the layer if DDP finds that a backward pass computes its gradients twice."""
    if not _is_of_ddp(error, _TWICE):
        return None
    found = _TWICE_INDEX.search(str(error))
    layer = list(context.built.trainable)[int(found[1])].rpartition(".")[0] if found else "a layer"
    return ExperimentError.of(
        "parallel.options.static_graph",
        f"is false, but one backward pass computes the gradients of {layer or 'the model'} twice, as "
        "torch.utils.checkpoint with use_reentrant=True does. Set static_graph: true, or use_reentrant=False.",
    )


def _explain_call(error: Exception, context: TrainContext, batch: Any) -> ExperimentError | None:
    """Name the inputs if the model's ``forward`` doesn't take them as its only argument."""
    is_of_the_call = str(error).startswith(f"{type(context.model).forward.__qualname__}() ")
    if not isinstance(error, TypeError) or not is_of_the_call or not isinstance(context.task, Supervised):
        return None
    return ExperimentError.of(
        "model",
        f"is called with one argument, the batch's inputs ({described(batch[0])}), but {error}. Set `task:` to "
        "a class that calls the model with its arguments.",
    )


def _explain_columns(error: Exception, context: TrainContext, batch: Any) -> ExperimentError | None:
    """Name the keys of a batch that the model doesn't take, if the error is about one of them."""
    model = context.model
    found = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if found is None or not isinstance(batch, Mapping) or found[1] not in batch:
        return None
    parameters = inspect.signature(model.forward).parameters
    if found[1] in parameters:  # another function of the model raised it
        return None
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    columns = [found[1]] if takes_any else [name for name in batch if name not in parameters]
    return ExperimentError.of(
        "data",
        f"samples have {listed(columns)}, which {type(model).__name__} does not take as an argument. Remove this from "
        "the samples, e.g. with dataset.remove_columns of Hugging Face datasets.",
    )


def _explain_lone_sample(error: Exception, context: TrainContext, batch: Any) -> ExperimentError | None:
    """Name the rank with a single sample, which has no variance for BatchNorm, and a batch size that avoids it."""
    if not isinstance(error, ValueError) or not isinstance(batch, MicroBatch) or len(batch.indices) != 1:
        return None
    if batch_norm.__code__ not in [frame.f_code for frame, _ in walk_tb(error.__traceback__)]:
        return None
    order, rank, parts = context.order, context.rank, context.accumulation
    samples = round(1 / batch.weight) if batch.weight else order.samples % order.global_batch_size
    split = [f"{rank.world_size} workers"] * (rank.world_size > 1) + [f"{parts} micro-batches each"] * (parts > 1)
    shared = f" ({', '.join(split)})" if split else ""
    return ExperimentError.of(
        "train.global_batch_size",
        f"rank {rank.rank} gets one sample of a global batch of {samples}{shared}, but BatchNorm needs at least 2. "
        f"{_size_without_lone_samples(context)}, or use a layer without batch statistics, e.g. GroupNorm.",
    )


def _size_without_lone_samples(context: TrainContext) -> str:
    order, needed = context.order, 2 * context.rank.world_size * context.accumulation
    if order.is_endless:  # all batches have the same size
        return f"Set {needed} or more, so that each rank gets at least 2"
    samples = order.samples
    sizes = [size for size in range(1, samples + 1) if min(size, samples % size or size) >= needed]
    if not sizes:
        return f"With only {samples} samples, use fewer workers or micro-batches"
    closest = min(sizes, key=lambda size: abs(size - order.global_batch_size))
    return f"Set {closest}, so that each rank gets at least 2"


def _is_of_ddp(error: Exception, text: str) -> bool:
    return isinstance(error, RuntimeError) and text in str(error) and is_from_torch(error)


_RULES: tuple[Callable[[Exception, TrainContext, Any], ExperimentError | None], ...] = (
    _explain_loss,
    _explain_unused_parameters,
    _explain_double_gradients,
    _explain_call,
    _explain_columns,
    _explain_lone_sample,
)
