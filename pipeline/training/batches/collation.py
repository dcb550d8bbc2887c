"""Collate functions of an experiment, and whether they draw random numbers.

A collate function may draw in training, e.g. to mix the samples of a batch. In an evaluation it may only if the
experiment says so with ``loader.evaluation_collate``, because the result is random.
"""

import copy
import logging
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.loader_section import DEFAULT_COLLATE
from pipeline.errors import ExperimentError
from pipeline.training.batches.fetch import Collate
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.training.ranks.randomness import GENERATORS, generators_kept, watch

_LOOKS = 4
"""Batches of each size that are looked at, where random numbers are allowed."""
_State = tuple[Tensor, object, Any]
_log = logging.getLogger(__name__)


class Collation:
    """A collate function that notices, in each process, whether it draws random numbers."""

    def __init__(self, function: Collate, *, key: str, is_fixed: bool = False) -> None:
        """Wrap a function.

        Args:
            function: makes a batch of samples.
            key: key in the experiment file, for errors.
            is_fixed: True to reject random numbers.
        """
        self.key = key
        self.draws = False
        """True once it was seen to draw random numbers."""
        self.is_fixed, self._function = is_fixed, function
        self._looks = Counter[int]()

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch.

        Raises:
            ExperimentError: the function draws random numbers, which are rejected.
        """
        looks = self._looks[len(samples)]
        if self.draws or (looks >= _LOOKS and not self.is_fixed):
            self.check()
            return self._function(samples)
        self._looks[len(samples)] += 1
        unchanged = _copy(samples) if looks < _LOOKS else samples  # the function may pop a key, or scale in place
        before = _states()
        batch = self._function(samples)
        has_drawn = not _are_equal(before, _states())
        try:
            # Some generators do not show: those of the function itself, and global ones that it sets back.
            is_drawn_again = has_drawn and self._moves(unchanged)
            self.draws = is_drawn_again or (self.is_fixed and not looks and self._varies(unchanged))
        except Exception as error:  # noqa: BLE001 - it may take no samples twice; what the first call showed counts
            _log.info("%s can't be called again on the same samples", self.key, exc_info=error)
            self.draws = has_drawn
        self.check()
        return batch

    def check(self) -> None:
        """Raise ExperimentError if the function was seen to draw random numbers, which are rejected."""
        if self.is_fixed and self.draws:
            raise ExperimentError.of(
                self.key,
                "draws random numbers. Without loader.evaluation_collate it also makes the batches of validation and "
                "test sets, so their results are random. Set loader.evaluation_collate, e.g. to {_target_: "
                f"{DEFAULT_COLLATE}}}. To keep the random numbers, set it to the component of loader.collate.",
            )

    def _moves(self, samples: list[Any]) -> bool:
        """Return True if a generator moves each time: another thread may have drawn once."""
        for _ in range(2):
            again, before = _copy(samples), _states()
            self._function(again)
            if _are_equal(before, _states()):
                return False
        return True

    def _varies(self, samples: list[Any]) -> bool:
        """Return True if the function makes another batch of the same samples each time."""
        prints = set[str]()
        with generators_kept():
            watch(GENERATORS)
            for _ in range(2):
                prints.add(fingerprint(self._function(_copy(samples))))
                torch.rand(()), random.random(), np.random.random_sample()  # noqa: S311 - moves the generators
        return len(prints) > 1


def _copy(value: Any) -> Any:
    """Copy samples as far as a collate function may change them; objects that they refer to may be large."""
    if type(value) is dict:
        return {name: _copy(one) for name, one in value.items()}
    if type(value) in (list, tuple) and not (value and isinstance(value[0], int | float | str)):  # not each token
        return type(value)(map(_copy, value))
    if isinstance(value, Tensor):
        return value.clone()
    with suppress(Exception):  # an object that can't be copied
        return copy.copy(value)
    return value


def _states() -> _State:
    """Return the states of the global generators; the pickles of `pipeline.training.ranks.randomness` take longer."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _are_equal(one: _State, other: _State) -> bool:
    (_, keys, *rest), (_, other_keys, *other_rest) = one[2], other[2]
    same = torch.equal(one[0], other[0]) and one[1] == other[1] and rest == other_rest
    return same and np.array_equal(keys, other_keys)
