"""Verbs of earlier versions, with what to write instead."""

from collections.abc import Mapping, Sequence

from pipeline.errors import UsageError

VERBS: Mapping[str, str] = {
    "diff": "pipeline compare {run} RUN",
    "measure": "pipeline benchmark {run}",
    "tune-batch": "pipeline benchmark {file} --batch-sizes auto",
    "predict": "pipeline benchmark {file} --predict 8,64",
    "status": "ray job status {job} --address URL",
    "logs": "ray job logs {job} --follow --address URL",
    "stop": "ray job stop {job} --address URL",
}
"""Command that does the same today, by the earlier verb."""


def check_verb(words: Sequence[str]) -> None:
    """Check that a command line does not use a verb of an earlier version.

    Raises:
        UsageError: it does; the message has the command to use instead, with the given file or run.
    """
    verb, target = [*words[:2], "", ""][:2]
    if verb not in VERBS:
        return
    given = "" if target.startswith("-") else target
    command = VERBS[verb].format(file=given or "FILE", run=given or "RUN", job=given or "ID")
    raise UsageError(f"pipeline {verb}: removed. Use {command}")
