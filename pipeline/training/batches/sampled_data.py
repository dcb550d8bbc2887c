"""Reading of the samples whose digests are compared when a training resumes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.protocol.progress import ProgressReporter
from pipeline.training.batches.data_digest import DataDigest, SampleDigest
from pipeline.training.batches.loader import BatchLoader
from pipeline.training.batches.rank_data import Source
from pipeline.training.ranks.fingerprints import Leaf, iter_leaves

SAMPLES = 64
"""Samples to compare, a quarter of them of the validation set if there is one."""
_BUDGET_S = 10.0
_VALUES = 14
"""Values of an array that are kept, to distinguish a rounding from other data."""
_PROJECTIONS = np.random.default_rng(0).standard_normal((4, 4093)) / 4
"""Weights of sums over an array, relative to its norm: one changed value shows in them, a rounding of all doesn't."""


def read_digest(source: Source, *, budget_s: float = _BUDGET_S) -> DataDigest:
    """Read the samples of the digest: by index twice each, of a training set that is a stream the first ones once."""
    sets = {"training": source.train, "validation": source.validation, "test": source.test}
    sizes = {"validation": source.validation_samples, "test": source.test_samples}
    sizes = {"training": 0 if source.order.is_endless else source.order.set_size, **sizes}
    sizes = {name: size for name, size in sizes.items() if sets[name] is not None}
    samples: dict[str, SampleDigest] = {}
    unstable = unread = 0
    end = time.monotonic() + budget_s
    with ProgressReporter("checking samples for changes", total=SAMPLES, unit="samples") as progress:
        for name, readings in _readings(source, sizes):
            if time.monotonic() > end:
                unread += 1
                continue
            try:
                digests = [digest_of(sample) for sample in readings]
            except Exception:
                if source.order.is_stream:  # it can't be read again
                    raise
                unread += 1  # training reports the error if it reads the sample
                continue
            if len({one.exact for one in digests}) > 1:
                unstable += 1
            else:
                samples[name] = digests[0]
            progress.by(1)
    return DataDigest(sizes=sizes, samples=samples, unstable=unstable, unread=unread)


def digest_of(sample: Any) -> SampleDigest:
    """Return the digest of a sample, as a batch of one."""
    exact, layout, values = blake2b(digest_size=8), blake2b(digest_size=8), list[str]()
    for place, leaf in iter_leaves(sample, "", with_text=True, with_objects=True):
        array = _as_array(leaf)
        form = f"{place} {array.dtype} {array.shape}".encode()
        layout.update(form)
        exact.update(form)
        content = np.ascontiguousarray(array).tobytes()
        exact.update(content)
        if array.dtype.kind == "f" and array.size:
            values.append(_some_values(array))
        else:
            layout.update(content)
    return SampleDigest(exact=exact.hexdigest(), layout=layout.hexdigest(), values=";".join(values))


def _readings(source: Source, sizes: Mapping[str, int]) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield the readings of each sample by its name."""
    if not isinstance(source.train, BatchLoader):
        for index in range(min(source.train.readable, source.order.set_size)):
            yield f"sample {index} of the training set", source.train.iter_head_sample(index)
        return
    loaders = {"training": source.train, "validation": source.validation}
    held_out = SAMPLES // 4 if isinstance(source.validation, BatchLoader) else 0
    spread = [("training", index) for index in _spread(sizes["training"], SAMPLES - held_out)]
    spread += [("validation", index) for index in _spread(sizes.get("validation", 0), held_out)]
    # Mixed, so that those that are read in time are spread over the sets, too.
    for name, index in (spread[place] for place in np.random.default_rng(0).permutation(len(spread))):
        loader = loaders[name]
        assert isinstance(loader, BatchLoader)
        yield f"sample {index} of the {name} set", (loader.read([index]) for _ in range(2))


def _spread(samples: int, count: int) -> Sequence[int]:
    count = min(samples, count)
    return [number * (samples - 1) // max(1, count - 1) for number in range(count)]


def _as_array(leaf: Leaf) -> np.ndarray[Any, Any]:
    if isinstance(leaf, Tensor):
        tensor = leaf.detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).resolve_conj().resolve_neg().numpy()
    return np.frombuffer(leaf.encode(errors="surrogatepass"), dtype=np.uint8) if isinstance(leaf, str) else leaf


def _some_values(array: np.ndarray[Any, Any]) -> str:
    flat = array.reshape(-1).astype(np.float64, copy=False)
    some = flat[:: -(-flat.size // _VALUES)].tolist()
    sums = _PROJECTIONS @ _fold(flat, _PROJECTIONS.shape[1]) / (np.linalg.norm(flat) or 1.0)
    return " ".join(f"{one:.6g}" for one in (*some, flat.mean(), np.abs(flat).mean(), *sums.tolist()))


def _fold(flat: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Return the sum of an array's parts of this size."""
    whole = flat.size // size * size
    folded: np.ndarray[Any, Any] = flat[:whole].reshape(-1, size).sum(0)
    folded[: flat.size - whole] += flat[whole:]
    return folded
