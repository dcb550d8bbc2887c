"""Search for the batch size of a device, by doubling the declared one: ``--batch-sizes auto``."""

from collections.abc import Callable

from pipeline.commands.benchmark.matrix import Cell, batch_cell

GROWTH = 1.05
"""Factor by which throughput must grow for a batch to be doubled again."""


def double_batch(
    declared: Cell, *, rate: Callable[[str], float | None], measure: Callable[[Cell], float | None]
) -> None:
    """Measure batches twice as large as the last, until memory or data run out, or throughput hardly grows.

    A declared batch that is too large itself is halved until it can be measured.

    Args:
        declared: the experiment's own configuration, which has been measured.
        rate: returns the throughput of a measured cell by its name; None if it could not be measured.
        measure: measures a cell and returns its throughput; None if it could not be measured.
    """
    if declared.trial is None:
        return
    size = declared.trial.device_batch_size
    last = rate(declared.name)
    if last is None:
        while size > 1 and last is None:
            size //= 2
            last = measure(batch_cell(declared, size))
        return
    while True:
        size *= 2
        found = measure(batch_cell(declared, size))
        if found is None or found < GROWTH * last:
            return
        last = found
