"""Fingerprints of values, and checks that all ranks build equal datasets and models."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.tasks.trainee import AsModule
from pipeline.train.names import shown
from pipeline.train.ranks import gather

_FEW = 4  # Samples of each set to compare: sets that were split or shuffled differently differ in almost all samples
_GENERATORS = "The global generators of torch, NumPy and Python have the same seed on all ranks"
_OF_MODULES = frozenset(vars(nn.Module()))  # Attributes that torch gives every module
Prints = dict[str, str]  # Fingerprints of values by path


def fingerprint(value: Any) -> str:
    """Return a short hash of all tensors, arrays, numbers and texts in a value."""
    leaves = repr(sorted(_iter_prints(value, "", with_text=True)))
    return hashlib.blake2b(leaves.encode(), digest_size=8).hexdigest()


def prints(values: Mapping[str, Tensor]) -> Prints:
    """Return fingerprints of tensors by their names."""
    return {path: one for name, value in values.items() for path, one in _iter_prints(value, name, with_text=False)}


def attribute_prints(module: nn.Module) -> Prints:
    """Return fingerprints of attributes with numbers, tensors or arrays that are neither parameters nor buffers."""
    state = {id(one) for one in (*module.parameters(), *module.buffers())}
    found: Prints = {}
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        own = vars(inner.inner) if isinstance(inner, AsModule) and hasattr(inner.inner, "__dict__") else vars(inner)
        for attribute, value in own.items():
            # A plain task has parameters as attributes, and an LSTM a list of them.
            if attribute not in _OF_MODULES and not isinstance(value, nn.Parameter):
                found |= _iter_prints(value, f"{prefix}{attribute}", with_text=False, but=state)
    return found


def _iter_prints(value: Any, place: str, *, with_text: bool, but: Collection[int] = ()) -> Iterator[tuple[str, str]]:
    """Yield fingerprints of all tensors, arrays and numbers in a value, of texts if asked."""
    if isinstance(value, Tensor):
        is_shard = hasattr(value, "device_mesh")  # as the weights that an LSTM lists in an attribute, under fsdp
        if id(value) not in but and value.device.type != "meta" and value.layout is torch.strided and not is_shard:
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            yield place, _digest(str(value.dtype), tuple(value.shape), content)
    elif isinstance(value, Number | np.generic) or (with_text and isinstance(value, str | bytes)):
        yield place, str(value)
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _iter_prints(item, f"{place}[{key!r}]", with_text=with_text, but=but)
    elif isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):  # also images of PIL
        array = np.asarray(value)
        if not array.dtype.hasobject:
            yield place, _digest(str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())


def _digest(kind: str, shape: Sequence[int], content: bytes) -> str:
    return hashlib.blake2b(f"{kind} {shape}".encode() + content, digest_size=8).hexdigest()


def check_data(sets: Mapping[str, tuple[Callable[[list[int]], Any], int, int]], *, rank: Rank) -> None:
    """Compare sizes and some samples of the datasets over the ranks: (read, size, readable) by name. Collective."""
    if rank.world_size == 1:
        return
    sizes = gather((rank.place, {name: samples for name, (_, samples, _) in sets.items()}), rank=rank)
    if len({tuple(own.items()) for _, own in sizes}) > 1:
        each = (f"{place} has {', '.join(f'{n} {name} samples' for name, n in own.items())}" for place, own in sizes)
        raise _make_data_error(f"the datasets differ in size between ranks ({'; '.join(each)})")

    def read() -> Prints:
        found: Prints = {}
        for name, (read, _, readable) in sets.items():
            for index in sorted({number * (readable - 1) // (_FEW - 1) for number in range(_FEW)}):
                found |= _iter_prints(read([index]), f"sample {index} of the {name} set/", with_text=True)
        return found

    first = gather(read(), rank=rank)
    if not (places := _find_differing(first)):
        return
    second = gather(read(), rank=rank)
    for place in places:
        if all(once.get(place) == again.get(place) for once, again in zip(first, second, strict=True)):
            raise _make_data_error(f"{place.partition('/')[0]} differs {_describe_ranks(first, place, rank=rank)}")


def check_order(indices: npt.NDArray[np.int64], *, rank: Rank) -> None:
    """Compare the order of an epoch, shape (samples,), over the ranks. Collective."""
    ranks = [{"": one} for one in gather(_digest("order", indices.shape, indices.tobytes()), rank=rank)]
    if _find_differing(ranks):
        raise ExperimentError.of(
            "sampler",
            f"differs {_describe_ranks(ranks, '', rank=rank)}. Draw from a seeded generator, and do not use the rank "
            f"in it. {_GENERATORS}{hash_hint()}.",
        )


def check_module(module: nn.Module, *, key: str, rank: Rank, is_sharded: bool) -> None:
    """Compare tensors, arrays and numbers in a module's attributes over the ranks, but the rank itself. Collective."""
    if rank.world_size == 1:
        return
    own = attribute_prints(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_sharded else ():
        own |= _iter_prints(tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 16)], name, with_text=False)
    told = gather((rank.local_rank, own), rank=rank)
    ranks = [mine for _, mine in told]
    of_rank = [list(map(str, range(len(told)))), [str(local_rank) for local_rank, _ in told]]
    of_rank += [[str((number == 0) is first) for number in range(len(told))] for first in (True, False)]
    for place in _find_differing(ranks):
        if [mine.get(place) for mine in ranks] not in of_rank:
            raise ExperimentError.of(
                key,
                f"{shown(place)} differs {_describe_ranks(ranks, place, rank=rank)}. Draw it from a seeded generator, "
                f"or keep it in a buffer, which is broadcast from rank 0. {_GENERATORS}{hash_hint()}.",
            )


def find_differing(values: Mapping[str, Tensor], *, rank: Rank) -> list[str]:
    """List the names of the tensors that differ between ranks. Collective."""
    return [] if rank.world_size == 1 or not values else _find_differing(gather(prints(values), rank=rank))


def hash_hint() -> str:
    """Return what to do about the order of sets; empty where all processes have the same hashes."""
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return ""
    return ". If the code iterates over a set of strings, sort them, or set PYTHONHASHSEED to a number in all processes"


def _find_differing(ranks: Sequence[Prints]) -> list[str]:
    places: Iterable[str] = dict.fromkeys(place for own in ranks for place in own)
    return [place for place in places if len({own.get(place) for own in ranks}) > 1]


def _describe_ranks(ranks: Sequence[Prints], place: str, *, rank: Rank) -> str:
    """Name the first rank that differs from rank 0. Collective."""
    other = next(number for number, own in enumerate(ranks) if own.get(place) != ranks[0].get(place))
    places = gather(rank.place, rank=rank)
    return f"between {places[0]} and {places[other]}"


def _make_data_error(how: str) -> ExperimentError:
    return ExperimentError.of(
        "data",
        f"{how}. Some samples would be trained on twice, and others would leak into validation. Seed the generator "
        f"that splits or shuffles the data, and do not use the rank in it. {_GENERATORS}{hash_hint()}. "
        "On several machines, give all the same code and files.",
    )
