"""Variants of a study: several experiment files, or one file with several values of its keys."""

import shlex
from collections.abc import Sequence

from pipeline.errors import UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.wording import counted

_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_variants(
    files: Sequence[str], overrides: Sequence[str], *, vary: str | None
) -> list[tuple[str, ExperimentFile]]:
    """Read the variants of a study: each with its description.

    Args:
        files: the experiment files.
        overrides: overrides for all of them.
        vary: keys of one file with the values of the variants, e.g. "optimizer.lr=0.1,0.05".

    Raises:
        UsageError: there are not at least two variants.
        ExperimentError: a file is wrong.
    """
    if vary is not None:
        if len(files) != 1:
            raise UsageError(f"--vary varies one experiment file, and {len(files)} are named")
        return [
            (", ".join(settings), load(files[0], [*overrides, *settings, *shared]))
            for settings, shared in _parse_vary(vary)
        ]
    if len(files) == 1:
        raise UsageError(
            f"compare takes at least two experiment files, or --vary, e.g. --vary optimizer.lr=0.1,0.05. "
            f"Did you mean: pipeline benchmark {files[0]}"
        )
    if repeated := next((file for file in files if files.count(file) > 1), ""):
        raise UsageError(f"{repeated} is named twice")
    return [(file, load(file, overrides)) for file in files]


def _parse_vary(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the overrides of each variant, and those that all share.

    Raises:
        UsageError: no key has several values, or two keys have different numbers of them.
    """
    values: dict[str, list[str]] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--vary {text}: {error}".rstrip(".")) from None
    for word in words:
        key, equals, listed = word.partition("=")
        if not equals or not all(map(str.strip, _split(listed))):
            raise UsageError(f"--vary {word}: write key=value,value, e.g. --vary optimizer.lr=0.1,0.05")
        if key in values:
            raise UsageError(f"--vary: {key} is named twice. List its values, e.g. {key}=0.1,0.05")
        values[key] = _split(listed)
    counts = {key: len(found) for key, found in values.items() if len(found) > 1}
    if len(set(counts.values())) != 1:
        given = ", ".join(f"{key} has {counted(len(found), 'value')}" for key, found in values.items())
        example = '--vary "optimizer.lr=0.1,0.05 train.ema=null,0.99"'
        raise UsageError(
            f"--vary: {given or 'no key'}. Give each key the same number of values, or one, e.g. {example}"
        )
    shared = [f"{key}={found[0]}" for key, found in values.items() if key not in counts]
    number = next(iter(counts.values()))
    return [([f"{key}={values[key][index]}" for key in counts], shared) for index in range(number)]


def _split(text: str) -> list[str]:
    """Split a list of values at its commas, but not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += _BRACKETS.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
