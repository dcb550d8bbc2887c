"""Length of an iterable dataset, and whether it has a state to continue from."""

import inspect
from typing import Any

from torch.utils.data import IterableDataset


def is_iterable(dataset: object) -> bool:
    """Return True for an IterableDataset of torch or of Hugging Face's datasets, which is a subclass."""
    return isinstance(dataset, IterableDataset)


def find_length(dataset: Any) -> int | None:
    """Return ``len(dataset)``; None for a dataset without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def offers_state(dataset: object) -> bool:
    """Return True if a dataset can tell where it is, and continue there, as Hugging Face's and torchdata's do."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    try:
        inspect.signature(dataset.state_dict).bind()  # LitData's needs arguments that only its loader has
    except (TypeError, ValueError):
        return False
    return True
