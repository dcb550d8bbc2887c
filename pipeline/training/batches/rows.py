"""Check that a user's collate function returns a row for each sample.

Losses are weighted by the number of samples that a batch was requested with. A collate function that leaves samples
out, e.g. unreadable ones, would make every mean depend on how the samples are divided into batches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.batches.collation import Collation
from pipeline.training.batches.order import MicroBatch

Read = Callable[[list[int]], Any]
"""Function that returns samples as one batch."""


def count_rows(batch: Any) -> int | None:
    """Return the length of all fields of a batch; None if they have different lengths, or none."""
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(fields, list | tuple):
        fields = [fields]
    # Lists count in a batch without tensors only: default_collate makes lists of fields, too.
    sizes = {len(field) for field in fields if isinstance(field, Tensor) and field.ndim}
    sizes = sizes or {len(field) for field in fields if isinstance(field, list | tuple)}
    return sizes.pop() if len(sizes) == 1 else None


class RowCheck:
    """Comparison of the rows of collated batches with the numbers of samples."""

    def __init__(self, collate: Collation | None) -> None:
        self._key = "" if collate is None else collate.key
        self.is_needed = collate is not None
        """False without a collate function, for weighted losses, and once a batch shows another layout."""

    def check(self, micro_batch: MicroBatch, batch: Any, *, read: Read, what: str, names: bool) -> None:
        """Compare the rows of a batch that a loader has read with the number of its samples.

        Only if they differ, samples are read again, to find out if the collate function makes a row of each sample.

        Args:
            micro_batch: the samples.
            batch: the collated samples, on the CPU.
            read: reads samples of the same set.
            what: name of the set.
            names: True if ``read`` reads the samples of these indices, so that they can be named.

        Raises:
            ExperimentError: it does, and this batch has more or fewer rows than samples.
        """
        asked = len(micro_batch.indices)
        if (rows := count_rows(batch)) in (None, asked):
            return
        kept, left_out = list[int](), list[int]()
        for index in dict.fromkeys(micro_batch.indices):
            if (own := _rows_of([index], read)) not in (0, 1):
                self.is_needed = False
                return
            (kept if own else left_out).append(index)
        if len(kept) > 1 and _rows_of(kept[:2], read) != 2:  # such as time, or packed tokens
            self.is_needed = False
        elif len(kept) > 1 or rows == len(kept):
            raise _error(
                self._key, f"{asked} samples of the {what} set", rows, left_out=sorted(left_out) if names else []
            )


def _rows_of(indices: list[int], read: Read) -> int | None:
    """Return the rows of these samples; 0 if the collate function fails, as most do without a sample."""
    try:
        return count_rows(read(indices))
    except (ExperimentError, TrainingError):
        return 0


def _error(key: str, asked: str, rows: int | None, *, left_out: Sequence[int]) -> ExperimentError:
    shown = ", ".join(map(str, left_out[:8])) + (f" and {len(left_out) - 8} more" if len(left_out) > 8 else "")
    named = f". It leaves out {'samples' if len(left_out) > 1 else 'sample'} {shown}" if left_out else ""
    return ExperimentError.of(
        key,
        f"returned {rows} rows for {asked}{named}. Losses are weighted by the number of samples, so their mean "
        "would be wrong. Leave samples out in the dataset, e.g. torch.utils.data.Subset(dataset, readable), "
        "or return the divisor of the loss as StepOutput.weight.",
    )
