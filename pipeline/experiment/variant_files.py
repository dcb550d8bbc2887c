"""Variants of a comparison: several experiment files, or one file with several values of its keys."""

import shlex
from collections.abc import Sequence

from pipeline.errors import UsageError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.wording import counted


def read_variants(
    files: Sequence[str], overrides: Sequence[str], *, vary: str | None
) -> list[tuple[str, ExperimentFile]]:
    """Read the variants of a comparison, each with its description: files, or one file with the values of ``vary``."""
    if vary is not None:
        if len(files) != 1:
            raise UsageError(f"--vary varies one experiment file, and {len(files)} are named")
        each, shared = parse_vary(vary)
        return [(", ".join(own), load(files[0], [*overrides, *own, *shared])) for own in each]
    if len(files) == 1:
        raise UsageError(
            f"compare takes at least two experiment files, or --vary, e.g. --vary optimizer.lr=0.1,0.05. "
            f"Did you mean: pipeline benchmark {files[0]}"
        )
    if repeated := next((file for file in files if files.count(file) > 1), ""):
        raise UsageError(f"{repeated} is named twice")
    return [(file, load(file, overrides)) for file in files]


def parse_vary(text: str) -> tuple[list[list[str]], list[str]]:
    """Return the overrides of each variant, and those that all share, e.g. of "optimizer.lr=0.1,0.05 seed=7"."""
    values: dict[str, list[str]] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--vary {text}: {error}".rstrip(".")) from None
    for word in words:
        key, equals, listed = word.partition("=")
        found = _split(listed)
        if not equals or not all(map(str.strip, found)):
            raise UsageError(f"--vary {word}: write key=value,value, e.g. --vary optimizer.lr=0.1,0.05")
        if key in values:
            raise UsageError(f"--vary: {key} is named twice. List its values, e.g. {key}=0.1,0.05")
        values[key] = found
    counts = {len(found) for found in values.values() if len(found) > 1}
    if len(counts) != 1:
        given = ", ".join(f"{key} has {counted(len(found), 'value')}" for key, found in values.items()) or "no key"
        example = '--vary "optimizer.lr=0.1,0.05 train.ema=null,0.99"'
        raise UsageError(f"--vary: {given}. Give each key the same number of values, or one, e.g. {example}")
    shared = [f"{key}={found[0]}" for key, found in values.items() if len(found) == 1]
    varied = [[f"{key}={value}" for value in found] for key, found in values.items() if len(found) > 1]
    return [list(own) for own in zip(*varied, strict=True)], shared


def _split(text: str) -> list[str]:
    """Split a list of values at its commas, but not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
