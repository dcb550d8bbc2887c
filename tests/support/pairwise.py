"""Answers that hold every possible pair of answers, in few sets."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Answers = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairwise(questions: Mapping[str, Sequence[str]], *, valid: Callable[[Answers], bool]) -> list[Answers]:
    """Sets of answers in which each pair that some valid set has appears; the fullest first, so it is deterministic."""
    everything = [dict(zip(questions, values, strict=True)) for values in product(*questions.values())]
    candidates = [(answers, pairs(answers)) for answers in everything if valid(answers)]
    missing: set[Pair] = set().union(*(found for _, found in candidates))
    chosen = []
    while missing:
        answers, found = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        missing -= found
        chosen.append(answers)
    return chosen


def pairs(answers: Answers) -> frozenset[Pair]:
    return frozenset(combinations(sorted(answers.items()), 2))
