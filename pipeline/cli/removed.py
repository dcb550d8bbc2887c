"""Verbs of earlier versions, with what to write instead."""

from collections.abc import Mapping, Sequence

from pipeline.errors import UsageError

VERBS: Mapping[str, str] = {
    "compare": "benchmark {file}",
    "measure": "benchmark {run}",
    "tune-batch": "benchmark {file} --batch-sizes auto",
    "predict": "benchmark {file} --predict 8,64",
}
"""Verb and arguments that do the same today, by the earlier verb."""


def check_verb(words: Sequence[str]) -> None:
    """Check that a command line does not use a verb of an earlier version.

    Raises:
        UsageError: it does; the message has the command to use instead, with the given file or run.
    """
    verb, target = [*words[:2], "", ""][:2]
    if verb not in VERBS:
        return
    given = "" if target.startswith("-") else target
    command = VERBS[verb].format(file=given or "FILE", run=given or "RUN")
    raise UsageError(f"pipeline {verb}: removed. Use pipeline {command}")
