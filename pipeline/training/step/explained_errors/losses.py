"""Errors of torch's losses, explained by the shapes, types and values of the tensors that they were called with.

torch's own words name neither ("Target 10 is out of bounds."). The tensors are found in the frame of the loss that
failed, so any task and any function that calls one of `torch.nn.functional`'s losses is explained. Two tensors that
torch broadcasts to more elements, such as outputs of (8, 1) and targets of (8,), are refused: the loss would be that of
64 pairs, and torch only warns.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.tasks import StepOutput, Supervised, Task
from pipeline.tasks.from_model import described

_CLASSES = {functional.cross_entropy.__code__, functional.nll_loss.__code__}
_ELEMENTS = {
    function.__code__
    for function in (
        functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
        functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.poisson_nll_loss,
        functional.kl_div, functional.soft_margin_loss, functional.hinge_embedding_loss,
    )
}  # fmt: skip
_BROADCASTING = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
)  # fmt: skip
_WARNING = re.compile(
    r"Using a target size \(torch\.Size\(\[(.*?)\]\)\) that .* input size \(torch\.Size\(\[(.*?)\]\)\)"
)
"""Warning of four of torch's losses about targets and outputs that they broadcast."""
_IGNORED = -100
"""Default ``ignore_index`` of torch's losses."""


def explain(error: BaseException) -> str:
    """Explain an error that one of torch's losses raised for its tensors; empty if it is another error."""
    calls = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code in _CLASSES | _ELEMENTS]
    if not calls:
        return ""
    called = calls[-1]
    outputs, targets = called.f_locals["input"], called.f_locals["target"]
    if not isinstance(outputs, Tensor):
        return (
            f"needs a tensor, but the model returned {_kind(outputs)}; set `task:` to a class that selects the tensor"
        )
    if not isinstance(targets, Tensor):
        return f"needs a tensor of targets, but got {_kind(targets)}; set `task:` to a class that selects the tensor"
    if said := _lengths(outputs, called.f_locals, has_classes=called.f_code in _CLASSES):
        return said
    if called.f_code in _ELEMENTS:
        return _elements(outputs, targets)
    return _classes(outputs, targets, ignored=called.f_locals.get("ignore_index", _IGNORED))


def explain_broadcast(task: Task, output: StepOutput) -> str:
    """Explain the shapes of a batch that the experiment's loss, if it is torch's, broadcasts to more elements."""
    outputs, targets = output.outputs, output.targets
    if not isinstance(task, Supervised) or type(task.loss) not in _BROADCASTING:
        return ""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    return _elements(outputs, targets) if _grows(outputs.shape, targets.shape) else ""


@contextmanager
def explain_warnings() -> Iterator[list[str]]:
    """Yield a list that in the end explains torch's warnings about losses that broadcast to more elements.

    These are losses that a user's own task or function calls. Other warnings are given again.
    """
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    for warning in caught:
        match = _WARNING.match(str(warning.message))
        targets, outputs = (
            (tuple(map(int, re.findall(r"\d+", sizes))) for sizes in match.groups()) if match else ((), ())
        )
        if _grows(outputs, targets):
            told.append(f"gets outputs of shape {outputs} and targets of shape {targets}{_to(outputs, targets)}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _lengths(outputs: Tensor, given: Mapping[str, object], *, has_classes: bool) -> str:
    """Explain weights that are not one for each class."""
    for name in ("weight", "pos_weight"):
        weight = given.get(name)
        if not isinstance(weight, Tensor):
            continue
        classes = outputs.shape[1 if outputs.ndim > 1 else 0]
        does_fit = weight.shape == (classes,) if has_classes else _both(outputs.shape, weight.shape) == outputs.shape
        if not does_fit:
            shapes = f"{_tensor(name, weight)} for {_tensor('outputs', outputs)}"
            return f"gets {shapes}; set {name} to a list with one number for each class"
    return ""


def _both(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape that torch broadcasts two shapes to; None if it can't."""
    try:
        return tuple(torch.broadcast_shapes(tuple(one), tuple(other)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _grows(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two shapes broadcast to more elements than either has."""
    both = _both(one, other)
    return both is not None and math.prod(both) > max(math.prod(one), math.prod(other))


def _elements(outputs: Tensor, targets: Tensor) -> str:
    """Explain shapes or types that differ, for losses that compare each output with one target."""
    given = f"gets {_tensor('outputs', outputs)} and {_tensor('targets', targets)}"
    if outputs.shape != targets.shape:
        return given + _to(tuple(outputs.shape), tuple(targets.shape))
    if outputs.dtype != targets.dtype:
        return f"{given}, but needs the same type for both; return targets.float() from the dataset"
    return ""


def _to(outputs: Sequence[int], targets: Sequence[int]) -> str:
    """Return what torch makes of outputs and targets of two shapes, and what to write instead."""
    spread, remedy = "", "give both the same shape"
    if _grows(outputs, targets):
        spread = f", which torch broadcasts to {_both(outputs, targets)}"
    if outputs == (*targets, 1):
        remedy = "return targets.unsqueeze(-1) from the dataset, or outputs.squeeze(-1) from the model"
    elif targets == (*outputs, 1):
        remedy = "return targets.squeeze(-1) from the dataset, or outputs.unsqueeze(-1) from the model"
    return f"{spread}; {remedy}"


def _classes(outputs: Tensor, targets: Tensor, *, ignored: int) -> str:
    """Explain what is wrong with class numbers or class probabilities."""
    count = outputs.shape[1] if outputs.ndim > 1 else outputs.shape[0]
    given = f"gets {_tensor('outputs', outputs)} and {_tensor('targets', targets)}"
    if targets.shape == outputs.shape and outputs.ndim > 1:  # probabilities of the classes
        is_wrong = not targets.is_floating_point()
        remedy = "use class numbers, targets.argmax(1), or probabilities, targets.float()"
        return f"{given}; {remedy}" if is_wrong else ""
    if targets.is_floating_point() or targets.dtype not in (torch.int64, torch.uint8):
        return f"{given}, but class numbers must be int64; return targets.long() from the dataset"
    if targets.shape != (needed := (*outputs.shape[:1], *outputs.shape[2:]) if outputs.ndim > 1 else torch.Size()):
        return f"{given}; for {count} classes, targets must have the shape {tuple(needed)}"
    if targets.is_cuda:  # after a failed assertion on the device nothing can be read from it
        return ""
    return _range(targets[targets != ignored], given=given, count=count)


def _range(numbers: Tensor, *, given: str, count: int) -> str:
    """Explain class numbers that are not those of ``count`` classes."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)
    if low >= 0 and high < count:
        return ""
    remedy = f"give the model {high + 1} outputs, or number the classes from 0"
    if low < 0:
        remedy = f"number the classes from 0, or set ignore_index: {low} to ignore these targets"
    elif low > 0 and high == count:
        remedy = "number the classes from 0, e.g. targets - 1"
    return f"{given}. Targets are from {low} to {high}, but {count} classes are numbered 0 to {count - 1}; {remedy}"


def _tensor(name: str, tensor: Tensor) -> str:
    return f"{name} of shape {tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')})"


def _kind(value: object) -> str:
    """Describe what is no tensor, e.g. "a tuple of 2: Tensor (8, 10), Tensor (8, 16)"."""
    return described(value) if isinstance(value, Mapping | tuple | list) else f"a {type(value).__name__}"
