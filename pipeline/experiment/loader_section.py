"""The section ``loader`` of an experiment: the DataLoader of each worker."""

from typing import Literal

from pipeline.experiment.values import Component, NotNegative, Positive, Section

DEFAULT_COLLATE = "torch.utils.data.default_collate"
"""A collate function itself, as a component for ``loader``; others build one."""


class Loader(Section):
    """DataLoader of each worker."""

    num_workers: NotNegative = 0
    """DataLoader worker processes per training worker; 0 loads in the training process."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Copy batches to page-locked memory; auto: true on a GPU."""
    persistent_workers: bool = True
    """Keep the DataLoader worker processes between epochs."""
    prefetch_factor: Positive = 2
    """Batches that each DataLoader worker process prefetches."""
    random: bool | None = None
    """Seed the global random generators for each sample: true for a dataset that draws random numbers, e.g. to augment
    images. By default, a few samples of each dataset show it once, and a dataset that draws only later is an error.
    false never seeds samples, and does not check. Samples of an iterable dataset are always seeded."""
    collate: Component | None = None
    """Component that builds the collate_fn; default: torch's default_collate."""
    evaluation_collate: Component | None = None
    """Component that builds the collate_fn of validation and test sets; default: ``collate``. Required if ``collate``
    draws random numbers and there is such a set."""
