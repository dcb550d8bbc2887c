"""How the project's own code gets to the workers of a joined cluster, and is found there."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.cluster.package import Package, import_roots, own_packages, project_folder, staged, tracked
from pipeline.config.parallel import Parallel
from pipeline.config.values import Frozen

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray's jobs interface tells the driver that it starts


class Code(Frozen):
    """Where a worker finds the code."""

    folder: str | None = None
    """Working directory of the workers, where the node has it; relative to the one that Ray gives them."""
    paths: tuple[str, ...] = ()
    """Folders for ``sys.path``, relative to the working directory that Ray gives them, or absolute."""
    packages: tuple[str, ...] = ()
    """Top-level names of the project's own packages."""

    def enter(self) -> None:
        """Make this process, and those that it starts, find the code."""
        base = Path.cwd()
        paths = [str(base / path) for path in self.paths]
        sys.path[:0] = [path for path in paths if path not in sys.path]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        if self.folder is not None and (base / self.folder).is_dir():
            os.chdir(base / self.folder)


def to_send(parallel: Parallel, *, joined: bool) -> Package | None:
    """What a session sends to the cluster; None: nothing has to be sent.

    Raises:
        ResourceError: git doesn't tell what to send, or it is too much.
    """
    if not (joined and parallel.ship_code and own_packages()) or _is_there_as_a_job():
        return None
    return tracked(project_folder())


@contextmanager
def sent(package: Package | None, *, joined: bool) -> Iterator[tuple[Code, dict[str, Any]]]:
    """Where workers find the code, and Ray's ``runtime_env`` that brings it there."""
    if not joined:
        yield Code(), {}
        return
    root = package.root if package else project_folder()
    roots, packages = import_roots(root), own_packages()
    if package is None:
        here = tuple(str(root / path) for path in roots)
        yield Code(folder=str(Path.cwd()), paths=here, packages=packages), {}
        return
    code = Code(folder=os.path.relpath(Path.cwd(), root), paths=tuple(map(str, roots)), packages=packages)
    sys.stderr.write(f"sending {package}, to the cluster\n")
    with staged(package) as folder:
        yield code, {"working_dir": str(folder)}


def _is_there_as_a_job() -> bool:
    """Whether this is a job of the cluster, whose code has been sent along with it."""
    return "working_dir" in os.environ.get(_JOB, "")
