"""Note of an interruption that says how to continue the run, which the command line shows."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import TrainingError
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.uris import without_credentials_in
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.record.folder import is_kept


@contextmanager
def continuable(verb: Sequence[str], *, file: ExperimentFile, folder: Path) -> Iterator[None]:
    """Add a note to an interruption inside: how to continue the run, if it has made a step.

    An outer launcher ends the job when a rank fails: there, the note stands below that error, too.

    Args:
        verb: command that continues the run with ``--resume``, with its options; empty if none does.
        file: the experiment.
        folder: folder of the run.
    """
    try:
        yield
    except (KeyboardInterrupt, TrainingError) as error:
        if verb and is_kept(folder) and (isinstance(error, KeyboardInterrupt) or outer_launcher() is not None):
            error.add_note(way_on(verb, file=file, run=folder.name))
        raise


def way_on(verb: Sequence[str], *, file: ExperimentFile, run: str) -> str:
    """Return how to continue a run: the whole command, unless a script, an outer launcher or a job started it."""
    experiment = file.experiment
    if experiment.checkpoint.keep == 0:
        return "there is no checkpoint to continue from, since checkpoint.keep is 0"
    if not file.source:
        return f"continue it with resume={run!r}"
    if outer_launcher() is not None or experiment.parallel.address == "auto":
        return f"continue it with --resume {run}"
    name, *options = verb
    overrides = map(without_credentials_in, file.overrides)
    return f"continue it with: pipeline {shlex.join([name, str(file.path), *overrides, *options, '--resume', run])}"
