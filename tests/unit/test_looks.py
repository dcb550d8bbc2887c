"""A study that is looked at repeatedly is as honest as one that is looked at once."""

# promise: a study that is looked at until its answer is clear still says "better" wrongly in at most 5%

import random

import pytest

from pipeline.protocol.estimates import mean_of_independent
from pipeline.report.numbers.looks import confidence_of_look, plan_looks


def test_looks_grow_to_the_most_pairs() -> None:
    assert plan_looks(5, at_most=20) == (5, 7, 10, 14, 20)
    assert plan_looks(2, at_most=4) == (2, 3, 4)
    assert plan_looks(5, at_most=5) == (5,)


def test_the_looks_of_a_plan_share_its_error() -> None:
    assert confidence_of_look([1], index=0) == pytest.approx(0.95)
    assert confidence_of_look([5], index=0) == pytest.approx(0.99)
    assert confidence_of_look([1, 1], index=1) == pytest.approx(1 - 0.05 / 4)
    extensions = sum(1 - confidence_of_look([1] * 30, index=index) for index in range(1, 30))
    assert extensions == pytest.approx(0.025)


def test_false_alarms_of_a_study_that_is_looked_at_until_it_is_clear() -> None:
    """Of 600 studies without a difference, at most 5% find one; intervals of 95% at each look would in more than 8%."""
    looks = plan_looks(5, at_most=20)
    level = confidence_of_look([len(looks)], index=0)
    source = random.Random(17)
    alarms = naive = 0
    for _ in range(600):
        differences = [source.gauss(0, 1) for _ in range(looks[-1])]
        found = {confidence: [mean_of_independent(differences[:size], confidence=confidence) for size in looks]
                 for confidence in (level, 0.95)}  # fmt: skip
        alarms += any(not each.low <= 0 <= each.high for each in found[level])
        naive += any(not each.low <= 0 <= each.high for each in found[0.95])
    assert alarms <= 30
    assert naive > 48
