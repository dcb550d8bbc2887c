"""The project's code for a job: what git tracks, the experiment among it."""

import os
from pathlib import Path

from pipeline.cluster.package import Package, project_folder, tracked
from pipeline.errors import UsageError


def packed(experiment: Path) -> Package:
    """The files of the project that go along.

    Raises:
        UsageError: the experiment file is not one of them.
        ResourceError: there is no git repository, or too much in it.
    """
    package = tracked(project_folder())
    root = package.root.resolve()
    path = experiment.resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"{experiment}: lies outside of {root}, which is what goes to the cluster; move it there")
    if path.relative_to(root) not in package.files:
        raise UsageError(
            f"{experiment}: git doesn't track this file, so it wouldn't go along; git add {experiment}, "
            "a commit isn't needed"
        )
    return package


def working_folder(package: Package) -> Path:
    """Where we are, relative to the package's root: the run is to be in the same place."""
    return Path(os.path.relpath(Path.cwd().resolve(), package.root.resolve()))
