"""Errors of torch and of user code in a step: whose they are, and what they mean for the user's tensors and keys.

torch's words name no tensor, no parameter and no key of the experiment. The tensors of a loss are found in the frame
that failed, so any task and any function that calls one of `torch.nn.functional`'s losses is explained. What no rule
recognizes is raised as it is.
"""

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
from pipeline.system import PACKAGE
from pipeline.tasks import Supervised, describe
from pipeline.tasks.supervised import describe_shape, remedy_of_shapes
from pipeline.train.names import shown
from pipeline.wording import listed

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
_OTHER_TYPE = "inputs and weights have different types; return inputs.float() from the dataset"
_HINTS = (
    (
        "device-side assert",
        "an index is out of range on the GPU, usually a target that is not a class; use parallel.device=cpu to see it",
    ),
    ("index out of range in self", "compare the index with num_embeddings"),
    ("but expected Float", "return targets.float() from the dataset"),
    ("same dtype", _OTHER_TYPE),  # linear layers
    ("mixed dtype", _OTHER_TYPE),  # normalization
    ("should be the same", _OTHER_TYPE),  # convolutions
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
    if not isinstance(error, RuntimeError | IndexError) or not is_from_torch(error):
        return ""
    callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [each for each in callers if isinstance(each, nn.Module)]
    layer = ""
    if modules and not any(modules[-1].children()):
        name = next((name for name, each in modules[0].named_modules() if each is modules[-1]), "")
        name = shown(name.removeprefix("module."))
        layer = f"; in layer {name}: {modules[-1]}" if name and name != "model" else f"; in {modules[-1]}"
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
    """Raise the explanation of an error in a pass, if a rule recognizes it."""
    if isinstance(error, ExperimentError):
        return
    functions = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    found = None
    if not _CLASSES.isdisjoint(functions) or not _ELEMENTS.isdisjoint(functions):
        key, said = "task" if s.experiment.task else "loss", _explain_loss(error)
        found = ExperimentError.of(key, said) if said else None
    elif isinstance(error, RuntimeError) and is_from_torch(error) and _UNUSED in str(error):
        indices = _INDICES.search(str(error))  # which count the parameters that require a gradient
        names = [list(s.trainable)[int(index)] for index in indices[1].split()] if indices else ["a parameter"]
        found = ExperimentError.of(
            "parallel.options.find_unused_parameters",
            f"is false, but {listed(names)} got no gradient in a step on rank {s.rank.rank}. Set it to true if the "
            "model uses the parameters in some batches only. Otherwise remove them, or freeze them with train.freeze.",
        )
    elif isinstance(error, TypeError) and isinstance(s.task, Supervised):
        if str(error).startswith(f"{type(s.model).forward.__qualname__}() "):
            message = f"is called with one argument, the batch's inputs ({describe(batch[0])}), but {error}. Set "
            found = ExperimentError.of("model", f"{message}`task:` to a class that calls the model with its arguments.")
    elif isinstance(error, ValueError) and functional.batch_norm.__code__ in functions and part is not None:
        parts = s.rank.world_size * s.accumulation
        if len(part.indices) == 1:
            found = ExperimentError.of(
                "train.global_batch_size",
                f"rank {s.rank.rank} gets one sample of a global batch of {part.global_size}, but BatchNorm needs at "
                f"least 2. Set a size that leaves {2 * parts} or more to the last batch of {s.order.samples} samples, "
                "use fewer workers or micro-batches, or a layer without batch statistics, e.g. GroupNorm.",
            )
    if found is not None:
        raise found from error


def _explain_loss(error: Exception) -> str:
    """Explain an error that one of torch's losses raised for its tensors, by what the failing frame has."""
    calls = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code in _CLASSES | _ELEMENTS]
    outputs, targets = calls[-1].f_locals["input"], calls[-1].f_locals["target"]
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            given = describe(value) if isinstance(value, Mapping | tuple | list) else f"a {type(value).__name__}"
            return f"needs a tensor of {name}, but got {given}; set `task:` to a class that selects the tensor"
    given = f"gets {describe_shape('outputs', outputs)} and {describe_shape('targets', targets)}"
    if calls[-1].f_code in _CLASSES and (targets.shape != outputs.shape or outputs.ndim < 2):
        return _explain_classes(outputs, targets, given, ignored=calls[-1].f_locals.get("ignore_index", -100))
    if outputs.shape != targets.shape:
        return f"{given}; {remedy_of_shapes(tuple(outputs.shape), tuple(targets.shape))}"
    if outputs.dtype != targets.dtype:
        return f"{given}, but needs the same type for both; return targets.float() from the dataset"
    return ""


def _explain_classes(outputs: Tensor, targets: Tensor, given: str, *, ignored: int) -> str:
    """Explain what is wrong with class numbers."""
    count = outputs.shape[1 if outputs.ndim > 1 else 0]
    if targets.is_floating_point() or targets.dtype not in (torch.int64, torch.uint8):
        return f"{given}, but class numbers must be int64; return targets.long() from the dataset"
    if targets.shape != (needed := (*outputs.shape[:1], *outputs.shape[2:]) if outputs.ndim > 1 else torch.Size()):
        return f"{given}; for {count} classes, targets must have the shape {tuple(needed)}"
    numbers = targets[targets != ignored]
    if targets.is_cuda or not numbers.numel():  # after a failed assertion on the device nothing can be read from it
        return ""
    low, high = int(numbers.min()), int(numbers.max())
    if low >= 0 and high < count:
        return ""
    remedy = f"number the classes from 0, or set ignore_index: {low} to ignore these targets"
    if low >= 0:
        remedy = f"give the model {high + 1} outputs, or number the classes from 0"
    return f"{given}. Targets are from {low} to {high}, but {count} classes are numbered 0 to {count - 1}; {remedy}"
