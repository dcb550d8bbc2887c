"""Order of the training samples by ``sampler``: a function of (training set, epoch, generator) that returns indices.

A function with an argument ``batch_size``, which the file doesn't set, gets the global batch size.
"""

from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from pipeline.errors import ExperimentError
from pipeline.experiment import components, references
from pipeline.experiment.components import parameters_of
from pipeline.experiment.schema import Experiment
from pipeline.protocol.progress import report_progress_to
from pipeline.train.order import Indices, SampleOrder
from pipeline.train.reader import copy_dataset, find_datasets_with_epoch, set_epoch
from pipeline.train.seeds import keep_generators, mix, seed_all


def order_of(
    experiment: Experiment, dataset: Any, *, samples: int, allowed: tuple[str, ...], silent: bool = False
) -> SampleOrder:
    """Return the order of a training set: a shuffle, or that of ``sampler``; ``silent``: another rank tells progress.

    Raises:
        ExperimentError: the sampler fails, returns no indices of samples, or others when it is called again.
        TrainingError: ``set_epoch`` of the dataset failed.
    """
    seed, size = experiment.seed, experiment.train.global_batch_size
    component = references.fill_in(experiment).sampler
    new_order = partial(SampleOrder, set_size=samples, global_batch_size=size, seed=seed)
    if component is None:
        return new_order(samples=samples)
    parameters = parameters_of(components.resolve(component, key="sampler", allowed=allowed))
    if "batch_size" in parameters and "batch_size" not in component.arguments:
        component = component.model_copy(update={"batch_size": size})
    call, target = components.bind(component, key="sampler", allowed=allowed), component.target
    # Files that a sampler opens in a dataset must not be open in forked loader processes.
    dataset = copy_dataset(dataset) if experiment.loader.num_workers else dataset
    datasets = find_datasets_with_epoch(dataset)

    def called(epoch: int) -> Indices:
        set_epoch(datasets, epoch, seed=seed)
        with keep_generators(), report_progress_to(lambda _: None) if silent else nullcontext():
            seed_all(own := mix(seed, "order", epoch))
            drawn = call(dataset, epoch, torch.Generator().manual_seed(own))
        return _indices(drawn, epoch=epoch, samples=samples, target=target)

    kept = lru_cache(maxsize=2)(called)  # measurements begin an epoch several times, and a function may be slow
    count = len(kept(0))
    if not np.array_equal(called(0), kept(0)):
        raise ExperimentError.of(
            "sampler",
            f"{target} returned different indices when called again for the same epoch, so a resumed run would differ. "
            "Draw only from the generator that it receives.",
        )

    def draw(epoch: int, _: torch.Generator) -> Indices:
        drawn = kept(epoch)
        if len(drawn) != count:
            raise ExperimentError.of(
                "sampler",
                f"{target} returned {len(drawn):,} indices for epoch {epoch}, but {count:,} for epoch 0; return the "
                "same number for each epoch",
            )
        return drawn

    return new_order(samples=count, draw=draw)


def _indices(drawn: Any, *, epoch: int, samples: int, target: str) -> Indices:
    """Return what a function returned as indices, or raise ExperimentError."""
    where = f"{target} returned"
    try:
        indices = np.asarray(drawn)
    except (TypeError, ValueError, RuntimeError):
        indices = np.empty((), dtype=object)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        kind = type(drawn).__name__ + (f" of {indices.dtype} numbers" if indices.ndim == 1 else "")
        raise ExperimentError.of("sampler", f"{where} a {kind} for epoch {epoch}; it must return integer indices")
    if not indices.size:
        raise ExperimentError.of("sampler", f"{where} no indices for epoch {epoch}; return at least one")
    is_outside = (indices < 0) | (indices >= samples)
    if is_outside.any():
        place = int(is_outside.argmax())
        raise ExperimentError.of(
            "sampler",
            f"{where} index {indices[place]} at position {place} for epoch {epoch}, but samples are numbered from 0 to "
            f"{samples - 1}",
        )
    return indices.astype(np.int64)
