"""How long steps wait for their batches, measured while they train."""

import time

import torch

from pipeline.training.step import MicroBatches

Instant = float | torch.cuda.Event


class DataWait:
    """Times what a stream of micro-batches takes to give the next one, step by step.

    On a GPU the host runs ahead of what is computed, so its own waiting may cost nothing. There the device's clock
    counts: from the end of all that was queued before a batch was asked for until the batch is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Instant, Instant]] = []
        self._steps: list[list[tuple[Instant, Instant]]] = []

    def timed(self, stream: MicroBatches) -> MicroBatches:
        """The same micro-batches."""
        while True:
            begin = self._now()
            if (pair := next(stream, None)) is None:
                return
            self._spans.append((begin, self._now()))
            yield pair

    def end_step(self) -> None:
        """Count all that was waited for since the last one as one step's."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Milliseconds that each step since the last call has waited; the device must have come to the end of them."""
        steps, self._steps = self._steps, []
        return [sum(_milliseconds(begin, end) for begin, end in spans) for spans in steps]

    def _now(self) -> Instant:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _milliseconds(begin: Instant, end: Instant) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return 1000 * (end - begin)
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)  # noqa: PT018 (one device's clock)
    return float(begin.elapsed_time(end))
