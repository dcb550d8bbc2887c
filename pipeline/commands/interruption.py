"""Note of an interruption that says how to continue the run, which the command line shows."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.drive.recorded_run import is_complete
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.uris import without_credentials_in
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.plan import Plan
from pipeline.record.folder import is_kept
from pipeline.report.report_files import REPORT_NAME


@contextmanager
def continuable(verb: Sequence[str], plan: Plan, *, file: ExperimentFile, folder: Path) -> Iterator[None]:
    """Add a note to an interruption inside: how to continue the run, if it has made a step.

    Args:
        verb: command that continues the run with ``--resume``, with its options; empty if none does.
        plan: what it was to do.
        file: the experiment.
        folder: folder of the run.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if verb and is_complete(plan, folder):
            if (folder / REPORT_NAME).is_file():
                error.add_note(f"the training is complete; see it with: pipeline show {folder}")
            else:
                way = way_on(verb, file=file, run=folder.name)
                error.add_note(f"the training is complete, only its report is missing; {way}")
        elif verb and is_kept(folder):
            if file.experiment.checkpoint.keep == 0:
                error.add_note("there is no checkpoint to continue from, since checkpoint.keep is 0")
            else:
                error.add_note(way_on(verb, file=file, run=folder.name))
        raise


def way_on(verb: Sequence[str], *, file: ExperimentFile, run: str) -> str:
    """Return how to continue a run: the whole command, unless a script, an outer launcher or a job started it."""
    if not file.source:
        return f"continue it with resume={run!r}"
    if outer_launcher() is not None or file.experiment.parallel.address == "auto":
        return f"continue it with --resume {run}"
    name, *options = verb
    overrides = map(without_credentials_in, file.overrides)
    return f"continue it with: pipeline {shlex.join([name, str(file.path), *overrides, *options, '--resume', run])}"
