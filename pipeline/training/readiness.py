"""When each gradient is there: a backward pass watched by a hook on each parameter."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from pipeline.protocol.trial import Gradient
from pipeline.training.clock import synchronize

PASSES = 5

Backward = Callable[[Callable[[], object]], object]
"""Does forward and backward, and calls what it is given between them."""


def gradients(model: nn.Module, backward: Backward, *, device: torch.device) -> tuple[Gradient, ...]:
    """Size of each trainable parameter's gradient, and how far backward is when it is there; leaves no gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    passes = [_readiness(parameters, backward, device=device) for _ in range(PASSES + 1)][1:]  # the first is cold
    return tuple(
        Gradient(bytes=parameter.numel() * parameter.element_size(), ready=median(ready))
        for parameter, ready in zip(parameters, zip(*passes, strict=True), strict=True)
    )


def _readiness(parameters: list[nn.Parameter], backward: Backward, *, device: torch.device) -> list[float]:
    """Fraction of one backward pass after which each gradient is there; 1 for one that never is."""
    marks: dict[int, _Mark] = {}

    def note(number: int, _: Tensor | None = None) -> None:
        marks[number] = _Mark(device)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, number))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]
    try:
        backward(lambda: note(-1))
        end = _Mark(device)
        synchronize(device)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None
    whole = end.since(marks[-1])
    return [marks.get(number, end).since(marks[-1]) / whole for number in range(len(parameters))]


class _Mark:
    """An instant in the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event = _event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def since(self, other: "_Mark") -> float:
        """Milliseconds; the device must have come by both."""
        if self._event is not None and other._event is not None:
            return float(other._event.elapsed_time(self._event))
        return 1e3 * (self._time - other._time)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
