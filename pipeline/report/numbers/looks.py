"""When a study is looked at, and the confidence level of each look, so that repeated looks don't deceive.

Each look at a growing study is a chance to be wrong. The looks of a study share the error of 5%, so that all intervals
hold together with 95%, whenever it stops. The equal shares are the significance levels of Pocock's design, simplified
by Bonferroni's inequality: it needs no table and no law of the differences, and costs somewhat wider intervals.

Source: Pocock 1977, "Group sequential methods in the design and analysis of clinical trials", Biometrika 64; Lan and
DeMets 1983, "Discrete sequential boundaries for clinical trials", Biometrika 70, for looks that were not planned.
"""

import math
from collections.abc import Sequence

from pipeline.protocol.estimates import CONFIDENCE

_GROWTH = 1.4
"""Ratio of the numbers of pairs at two looks: each look has a price, and a few pairs more rarely decide."""


def plan_looks(first: int, *, at_most: int) -> tuple[int, ...]:
    """Return the numbers of pairs at which a study is looked at until its answer is clear, e.g. 5, 7, 10, 14, 20."""
    looks = [first]
    while looks[-1] < at_most:
        looks.append(min(at_most, math.ceil(round(_GROWTH * looks[-1], 6))))
    return tuple(looks)


def confidence_of_look(sizes: Sequence[int], *, index: int) -> float:
    """Return the confidence level of the interval at a look.

    A study as it was planned has the whole error of 5%. Each extension after an answer has half of what is left of it
    after a first half, so that all answers of extensions together hold with 97.5%.

    Args:
        sizes: number of looks of the first plan, and of each extension so far.
        index: of the plan that the look belongs to.
    """
    share = 1 - CONFIDENCE
    if index:
        share /= 2 ** (index + 1)
    return 1 - share / sizes[index]
