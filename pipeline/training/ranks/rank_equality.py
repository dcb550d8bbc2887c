"""Checks that all ranks build equal datasets, and models with equal attributes besides parameters and buffers.

Ranks exchange fingerprints in place of values. With a single rank, nothing is computed.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.training.ranks.collectives import gather
from pipeline.training.ranks.fingerprints import Prints, digest, iter_attribute_prints, iter_prints, prints

_FEW = 4
"""Samples of each set to compare: sets that were split or shuffled differently differ in almost all samples."""
_GENERATORS = "The global generators of torch, NumPy and Python have the same seed on all ranks"


class Readable(Protocol):
    """Loader that reads samples by index."""

    def read(self, indices: list[int]) -> Any:
        """Return samples as one batch, on the CPU."""


def check_data(sets: Mapping[str, tuple[Readable, int]], *, rank: Rank) -> None:
    """Compare the sizes and some samples of the datasets ("training", "validation") over the ranks. Collective.

    Samples that differ each time they are read, e.g. by a private generator or the clock, differ between ranks by
    intention, and are not compared.

    Raises:
        ExperimentError: ranks have different datasets.
    """
    if rank.world_size == 1:
        return
    sizes = gather((rank.place, {name: samples for name, (_, samples) in sets.items()}), rank=rank)
    if len({tuple(own.items()) for _, own in sizes}) > 1:
        told = "; ".join(f"{place} has {_sizes(own)}" for place, own in sizes)
        raise _different_data(f"the datasets differ in size between ranks ({told})")
    first = gather(_sampled(sets), rank=rank)
    if not (places := _differing(first)):
        return
    second = gather(_sampled(sets), rank=rank)
    for place in places:
        if all(once.get(place) == again.get(place) for once, again in zip(first, second, strict=True)):
            raise _different_data(f"{place.partition('/')[0]} differs {_between(first, place, rank=rank)}")


def check_order(indices: npt.NDArray[np.int64], *, rank: Rank) -> None:
    """Compare the order of an epoch, shape (samples,), over the ranks. Collective.

    Raises:
        ExperimentError: it differs.
    """
    if rank.world_size == 1:
        return
    prints = [{"": print_} for print_ in gather(digest("order", indices.shape, indices.tobytes()), rank=rank)]
    if _differing(prints):
        raise ExperimentError.of(
            "sampler",
            f"differs {_between(prints, '', rank=rank)}. Draw from a seeded generator, and do not use the rank in it. "
            f"{_GENERATORS}{hash_hint()}.",
        )


def check_module(module: object, *, key: str, rank: Rank, is_sharded: bool = False) -> None:
    """Compare tensors, arrays and numbers in a module's attributes over the ranks. Collective.

    Parameters and buffers are broadcast from rank 0, unless the model ``is_sharded``: then some values of each are
    compared, too. An attribute that holds the rank may differ.

    Raises:
        ExperimentError: an attribute differs.
    """
    if rank.world_size == 1 or not isinstance(module, nn.Module):
        return
    own = dict(iter_attribute_prints(module))
    if is_sharded:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            own |= iter_prints(_few_values(tensor), name, with_text=False)
    told = gather((rank.local_rank, own), rank=rank)
    prints = [mine for _, mine in told]
    ranks = [list(map(str, range(len(told)))), [str(local_rank) for local_rank, _ in told]]
    ranks += [[str((number == 0) is first) for number in range(len(told))] for first in (True, False)]
    for place in _differing(prints):
        if [mine.get(place) for mine in prints] in ranks:
            continue
        raise ExperimentError.of(
            key,
            f"{place} differs {_between(prints, place, rank=rank)}. Draw it from a seeded generator, or keep it in a "
            f"buffer, which is broadcast from rank 0. {_GENERATORS}{hash_hint()}.",
        )


def differing(values: Mapping[str, Tensor], *, rank: Rank) -> list[str]:
    """List the names of the tensors that differ between ranks. Collective."""
    return [] if rank.world_size == 1 or not values else _differing(gather(prints(values), rank=rank))


def hash_hint() -> str:
    """Return what to do about the order of sets, for messages; empty where all processes have the same hashes."""
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return ""
    return ". If the code iterates over a set of strings, sort them, or set PYTHONHASHSEED to a number in all processes"


def _sampled(sets: Mapping[str, tuple[Readable, int]]) -> Prints:
    """Compute fingerprints of a few samples of each dataset."""
    prints: Prints = {}
    for name, (loader, samples) in sets.items():
        last = min(samples, getattr(loader, "readable", samples)) - 1
        for index in sorted({number * last // (_FEW - 1) for number in range(_FEW)}):
            prints |= iter_prints(loader.read([index]), f"sample {index} of the {name} set/", with_text=True)
    return prints


def _few_values(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 16)]


def _differing(ranks: Sequence[Prints]) -> list[str]:
    """List the paths whose fingerprints differ between ranks."""
    places = dict.fromkeys(place for own in ranks for place in own)
    return [place for place in places if len({own.get(place) for own in ranks}) > 1]


def _between(ranks: Sequence[Prints], place: str, *, rank: Rank) -> str:
    """Name the first rank that differs from rank 0. Collective."""
    other = next(number for number, own in enumerate(ranks) if own.get(place) != ranks[0].get(place))
    named = gather(rank.place, rank=rank)
    return f"between {named[0]} and {named[other]}"


def _sizes(own: Mapping[str, int]) -> str:
    return ", ".join(f"{samples} {name} samples" for name, samples in own.items())


def _different_data(how: str) -> ExperimentError:
    return ExperimentError.of(
        "data",
        f"{how}. Some samples would be trained on twice, and others would leak into validation. Seed the generator "
        f"that splits or shuffles the data, and do not use the rank in it. {_GENERATORS}{hash_hint()}. "
        "On several machines, give all the same code and files.",
    )
