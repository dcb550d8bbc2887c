"""Errors of torch and of user code in a step: whose they are, and what they mean for the user's tensors and keys.

torch's words name no tensor, no parameter and no key of the experiment. The tensors of a loss are found in the frame
that failed, so any task and any function that calls one of `torch.nn.functional`'s losses is explained. What no rule
recognizes is raised as it is.
"""

import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from opcode import opmap
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Origin
from pipeline.system.imports import PACKAGE
from pipeline.tasks import Supervised, describe
from pipeline.tasks.supervised import describe_shape, remedy_of_shapes
from pipeline.train.names import listed, shown

if TYPE_CHECKING:
    from pipeline.train.order import MicroBatch
    from pipeline.train.state import State

# gloo's errors begin with a location in gloo's sources, as good as a frame; an enforced condition, such as equal sizes
# on both sides, has a different form, and does not mean a lost peer.
_GLOO = re.compile(r"\[\S*gloo/transport/\S+:\d+\] |^Application timeout caused pair closure")
_TIMEOUT = ("Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout")
"""Timeouts of gloo, of gloo's next operation, and of NCCL, which raise the same type for a lost peer and a late one."""
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Texts of the CPU's allocator, CUDA outside torch's allocator, cuBLAS, cuDNN; others are torch.OutOfMemoryError."""
TORCH, OURS = (f"{folder}{os.sep}" for folder in (Path(torch.__file__ or "").parent, PACKAGE))
"""Beginnings of the paths of torch's files and of this package's."""

_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_TWICE = "Expected to mark a variable ready only once"
_TWICE_INDEX = re.compile(r"Parameter at index (\d+)")
"""Errors of DDP, and where they count parameters, among those that require a gradient."""
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(.*?)'")
_OTHER_TYPE = "the inputs and weights of a layer have different types; return inputs.float() from the dataset"
_SELECT = "set `task:` to a class that selects the tensor"
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
_CLASSES = {functional.cross_entropy.__code__, functional.nll_loss.__code__}
_ELEMENTS = {
    function.__code__
    for function in (
        functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
        functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.poisson_nll_loss,
        functional.kl_div, functional.soft_margin_loss, functional.hinge_embedding_loss,
    )
}  # fmt: skip


def origin(error: BaseException) -> Origin:
    """Return the origin of an exception that ended this rank, as far as this rank can know."""
    lost = next((each for each in _iter_causes(error) if _is_of_a_collective(each)), None)
    if lost is None:
        return "rank"
    return "peer_timeout" if any(sign in str(lost) for sign in _TIMEOUT) else "lost_peer"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if there was too little memory, on a GPU or on CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    says = any(sign in str(error) for sign in _NO_MEMORY)
    return isinstance(error, RuntimeError) and is_from_torch(error) and says


def is_from_torch(error: BaseException) -> bool:
    """Return True if torch or its C++ code, which leaves no frame, raised an error, rather than user code."""
    file, has_raised = _place(error)
    return file.startswith(TORCH) or not has_raised


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True if torch.distributed failed because of another rank."""
    if isinstance(error, dist.DistNetworkError):  # a dataset may use its own store
        return _place(error)[0].startswith((TORCH, OURS))
    if isinstance(error, dist.DistBackendError):
        return is_from_torch(error)
    return type(error) is RuntimeError and is_from_torch(error) and _GLOO.search(str(error)) is not None


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the file that an exception comes from, and True if a ``raise`` statement of the file raised it."""
    entry = error.__traceback__
    if entry is None:  # from another process
        return "", True
    while entry.tb_next is not None:
        entry = entry.tb_next
    code = entry.tb_frame.f_code
    return code.co_filename, code.co_code[entry.tb_lasti] == opmap["RAISE_VARARGS"]


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, which may form a cycle."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__


def hint(error: BaseException) -> str:
    """Return the layer that an error of torch is from, and what a usual one means; empty for most of user code."""
    if "closure" in str(error) and any(frame.f_code.co_name == "step" for frame, _ in walk_tb(error.__traceback__)):
        return "; optimizers that need a closure are not supported: use one whose step() works without"
    if not isinstance(error, RuntimeError | IndexError) or not is_from_torch(error):
        return ""
    callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [each for each in callers if isinstance(each, nn.Module)]
    layer = ""
    if modules and not any(modules[-1].children()):
        name = next((name for name, each in modules[0].named_modules() if each is modules[-1]), "")
        name = name.removeprefix("module.")
        is_part = name and name != "model"
        layer = f"; in layer {shown(name)}: {modules[-1]}" if is_part else f"; in {modules[-1]}"
    return layer + next((f"; {meaning}" for text, meaning in _HINTS if text in str(error)), "")


@contextmanager
def refuse_broadcasts() -> Iterator[None]:
    """Raise torch's warning about a loss that broadcasts outputs and targets of different shapes as an error."""
    with warnings.catch_warnings():
        one = r"\(torch\.Size\(\[[1, ]*\]\)\)"  # element, which gives each of the others a partner
        different = rf"Using a target size (?!{one}).* that is different to the input size (?!{one})"
        warnings.filterwarnings("error", different, UserWarning)
        yield


def explain(error: Exception, s: "State", batch: Any, part: "MicroBatch | None" = None) -> None:
    """Raise the explanation of an error in a pass, if a rule recognizes it.

    Raises:
        ExperimentError: a rule recognizes the error.
    """
    if isinstance(error, ExperimentError):
        return
    found = (
        _explain_loss(error, s)
        or _explain_ddp(error, s)
        or _explain_call(error, s, batch)
        or (_explain_lone_sample(error, s, part) if part is not None else None)
    )
    if found is not None:
        raise found from error


def _explain_ddp(error: Exception, s: "State") -> ExperimentError | None:
    """Name the parameters that DDP waited for in the step before, or that got two gradients in one backward pass."""
    if not isinstance(error, RuntimeError) or not is_from_torch(error):
        return None
    known = list(s.trainable)
    if _UNUSED in str(error):
        found = _INDICES.search(str(error))
        names = [known[int(index)] for index in found[1].split()] if found else []
        if frozen := [name for name in names if not s.trainable[name].requires_grad]:
            return ExperimentError.of(
                "parallel.options.find_unused_parameters",
                f"is false, but requires_grad of {listed(frozen)} was set to False after training started. Set "
                "find_unused_parameters: true, or freeze the parameters from the start with train.freeze.",
            )
        return ExperimentError.of(
            "parallel.options.find_unused_parameters",
            f"is false, but {listed(names) if names else 'a parameter'} got no gradient in a step on rank "
            f"{s.rank.rank}. Set it to true if the model uses the parameters in some batches only. Otherwise remove "
            "them, or freeze them with train.freeze.",
        )
    if _TWICE in str(error):
        found = _TWICE_INDEX.search(str(error))
        layer = known[int(found[1])].rpartition(".")[0] if found else "a layer"
        return ExperimentError.of(
            "parallel.options.static_graph",
            f"is false, but one backward pass computes the gradients of {layer or 'the model'} twice, as "
            "torch.utils.checkpoint with use_reentrant=True does. Set static_graph: true, or use_reentrant=False.",
        )
    return None


def _explain_call(error: Exception, s: "State", batch: Any) -> ExperimentError | None:
    """Name the inputs if the model's ``forward`` doesn't take them as its only argument, or a key of the batch."""
    if not isinstance(error, TypeError):
        return None
    forward = f"{type(s.model).forward.__qualname__}() "
    if str(error).startswith(forward) and isinstance(s.task, Supervised):
        return ExperimentError.of(
            "model",
            f"is called with one argument, the batch's inputs ({describe(batch[0])}), but {error}. Set `task:` to "
            "a class that calls the model with its arguments.",
        )
    found = _UNEXPECTED.search(str(error))
    if found is None or not isinstance(batch, Mapping) or found[1] not in batch:
        return None
    parameters = inspect.signature(s.model.forward).parameters
    if found[1] in parameters:  # another function of the model raised it
        return None
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    columns = [found[1]] if takes_any else [name for name in batch if name not in parameters]
    return ExperimentError.of(
        "data",
        f"samples have {listed(columns)}, which {type(s.model).__name__} does not take as an argument. Remove this "
        "from the samples, e.g. with dataset.remove_columns of Hugging Face datasets.",
    )


def _explain_lone_sample(error: Exception, s: "State", part: "MicroBatch") -> ExperimentError | None:
    """Name the rank with a single sample, which has no variance for BatchNorm, and a batch size that avoids it."""
    if not isinstance(error, ValueError) or len(part.indices) != 1:
        return None
    if functional.batch_norm.__code__ not in [frame.f_code for frame, _ in walk_tb(error.__traceback__)]:
        return None
    order, ranks, parts = s.order, s.rank.world_size, s.accumulation
    split = [f"{ranks} workers"] * (ranks > 1) + [f"{parts} micro-batches each"] * (parts > 1)
    shared, needed = f" ({', '.join(split)})" if split else "", 2 * ranks * parts
    sizes = [size for size in range(1, order.samples + 1) if min(size, order.samples % size or size) >= needed]
    if order.is_endless:  # all batches have the same size
        remedy = f"Set {needed} or more, so that each rank gets at least 2"
    elif not sizes:
        remedy = f"With only {order.samples} samples, use fewer workers or micro-batches"
    else:
        closest = min(sizes, key=lambda size: abs(size - order.global_batch_size))
        remedy = f"Set {closest}, so that each rank gets at least 2"
    return ExperimentError.of(
        "train.global_batch_size",
        f"rank {s.rank.rank} gets one sample of a global batch of {part.global_size}{shared}, but BatchNorm needs at "
        f"least 2. {remedy}, or use a layer without batch statistics, e.g. GroupNorm.",
    )


def _explain_loss(error: Exception, s: "State") -> ExperimentError | None:
    """Explain an error that one of torch's losses raised for its tensors."""
    calls = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code in _CLASSES | _ELEMENTS]
    if not calls:
        return None
    given, has_classes = calls[-1].f_locals, calls[-1].f_code in _CLASSES
    outputs, targets = given["input"], given["target"]
    if not isinstance(outputs, Tensor):
        said = f"needs a tensor, but the model returned {_kind(outputs)}; {_SELECT}"
    elif not isinstance(targets, Tensor):
        said = f"needs a tensor of targets, but got {_kind(targets)}; {_SELECT}"
    else:
        said = _explain_lengths(outputs, given, has_classes=has_classes) or (
            _explain_classes(outputs, targets, ignored=given.get("ignore_index", -100))
            if has_classes
            else _explain_elements(outputs, targets)
        )
    return ExperimentError.of("task" if s.experiment.task else "loss", said) if said else None


def _explain_lengths(outputs: Tensor, given: Mapping[str, object], *, has_classes: bool) -> str:
    """Explain weights that are not one for each class."""
    for name in ("weight", "pos_weight"):
        weight = given.get(name)
        if isinstance(weight, Tensor):
            classes = outputs.shape[1 if outputs.ndim > 1 else 0]
            try:
                fits = torch.broadcast_shapes(outputs.shape, weight.shape) == outputs.shape  # type: ignore[no-untyped-call]
            except RuntimeError:
                fits = False
            if not (weight.shape == (classes,) if has_classes else fits):
                shapes = f"{describe_shape(name, weight)} for {describe_shape('outputs', outputs)}"
                return f"gets {shapes}; set {name} to a list with one number for each class"
    return ""


def _explain_elements(outputs: Tensor, targets: Tensor) -> str:
    """Explain shapes or types that differ, for losses that compare each output with one target."""
    given = f"gets {describe_shape('outputs', outputs)} and {describe_shape('targets', targets)}"
    if outputs.shape != targets.shape:
        return f"{given}; {remedy_of_shapes(tuple(outputs.shape), tuple(targets.shape))}"
    if outputs.dtype != targets.dtype:
        return f"{given}, but needs the same type for both; return targets.float() from the dataset"
    return ""


def _explain_classes(outputs: Tensor, targets: Tensor, *, ignored: int) -> str:
    """Explain what is wrong with class numbers or class probabilities."""
    count = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    given = f"gets {describe_shape('outputs', outputs)} and {describe_shape('targets', targets)}"
    if targets.shape == outputs.shape and outputs.ndim > 1:  # probabilities of the classes
        remedy = "use class numbers, targets.argmax(1), or probabilities, targets.float()"
        return f"{given}; {remedy}" if not targets.is_floating_point() else ""
    if targets.is_floating_point() or targets.dtype not in (torch.int64, torch.uint8):
        return f"{given}, but class numbers must be int64; return targets.long() from the dataset"
    if targets.shape != (needed := (*outputs.shape[:1], *outputs.shape[2:]) if outputs.ndim > 1 else torch.Size()):
        return f"{given}; for {count} classes, targets must have the shape {tuple(needed)}"
    if targets.is_cuda:  # after a failed assertion on the device nothing can be read from it
        return ""
    numbers = targets[targets != ignored]
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
    if low >= 0 and high < count:
        return ""
    remedy = f"give the model {high + 1} outputs, or number the classes from 0"
    if low < 0:
        remedy = f"number the classes from 0, or set ignore_index: {low} to ignore these targets"
    elif low > 0 and high == count:
        remedy = "number the classes from 0, e.g. targets - 1"
    return f"{given}. Targets are from {low} to {high}, but {count} classes are numbered 0 to {count - 1}; {remedy}"


def _kind(value: object) -> str:
    return describe(value) if isinstance(value, Mapping | tuple | list) else f"a {type(value).__name__}"
