"""Phrases about a running trial, for terminals, notebooks and log files."""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta

from rich.filesize import decimal

from pipeline.protocol.events import Advanced, Metrics, Started

VALIDATION = "validation/"
_LOSS, _THROUGHPUT = "train/loss", "throughput/samples_per_second"


def figures(values: Mapping[str, float]) -> Iterator[str]:
    """Yield the loss, the throughput and the validation metrics, e.g. "loss 0.31"."""
    if _LOSS in values:
        yield f"loss {values[_LOSS]:.4g}"
    if _THROUGHPUT in values:
        yield f"{values[_THROUGHPUT]:,.4g} samples/s"
    yield from (f"{name} {value:.4g}" for name, value in values.items() if name.startswith(VALIDATION))


def facts(event: Started) -> str:
    """Describe model size, data, steps and devices in one line."""
    samples = f"{event.train_samples:,} training and {event.validation_samples:,} validation samples"
    devices = [f"{count} x ({name})" if count > 1 else name for name, count in Counter(event.devices).items()]
    shown = ", ".join(devices[:2]) + (f" and {len(devices) - 2} more" if len(devices) > 2 else "")
    return f"{event.parameters:,} parameters, {samples}, {event.total_steps:,} steps, on {shown}"


def position(event: Metrics, started: Started) -> list[str]:
    """Return step and epoch with their totals, e.g. "step 10/400" and "epoch 1/4"."""
    return [f"step {event.step}/{started.total_steps}", f"epoch {event.epoch}/{started.epochs}"]


def left(first: Metrics, now: Metrics, *, total: int) -> Iterator[str]:
    """Yield the remaining time at the average pace since the first report, pauses included."""
    steps, seconds = now.step - first.step, now.time - first.time
    if steps > 0 and seconds > 0 and now.step < total:
        rest = timedelta(seconds=round((total - now.step) * seconds / steps))
        yield f"{rest} left"


def amounts(event: Advanced) -> str:
    """Return the amount done and its total, e.g. "1,200/10,000 samples" or "12.3 MB/170 MB"."""
    known = [amount for amount in (event.done, event.total) if amount is not None]
    if event.unit == "B":
        return "/".join(map(decimal, known))
    return f"{'/'.join(f'{amount:,}' for amount in known)} {event.unit}".rstrip()
