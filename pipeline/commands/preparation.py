"""Preparation of a command's plan: the file is checked, and resources are found."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline import registry
from pipeline.drive import preflight
from pipeline.drive.execute import explain_problems
from pipeline.errors import UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.resources import Resources
from pipeline.system import begin_stage


def refuse_outer_launcher(command: str) -> None:
    """Raise UsageError in a process that ``torchrun`` or ``srun`` started as one of several."""
    if (outer := outer_launcher()) is not None:
        raise UsageError(f"pipeline {command} starts its workers itself: call it without {outer.name}")


@contextmanager
def planning(file: ExperimentFile, *, resumes: bool = False) -> Iterator[tuple[tuple[str, ...], Resources]]:
    """Check the file, yield the packages that it may name and the resources; give problems their line in the file.

    A run that ``resumes`` has its weights from a checkpoint, so those that it started from may be gone.

    Raises:
        ExperimentError: the file is wrong.
        ResourceError: the machine or the cluster is too small, or can't be reached.
    """
    begin_stage("importing torch, checking the experiment")
    allowed, parallel = preflight.check(file, with_weights=not resumes), file.experiment.parallel
    if parallel.launcher == "ray" and parallel.cluster:
        begin_stage(f"connecting to Ray at {parallel.cluster}")
    resources = registry.load("launchers", parallel.launcher).Launcher.resources(parallel)
    with explain_problems(file):
        yield allowed, resources
