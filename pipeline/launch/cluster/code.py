"""The project's own code on a cluster: the files that git tracks are sent, and workers add them to ``sys.path``.

Files that git doesn't track (data, environments, secrets in an ``.env``) stay on this machine.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ResourceError
from pipeline.experiment.targets import BUILT_IN, allowed_packages, project_file
from pipeline.experiment.values import Frozen
from pipeline.system.process import python_path
from pipeline.wording import counted

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray's jobs API for the driver that it starts, sent along with its code
MOST_BYTES = 100_000_000
"""Limit on the files of a package. Ray's own is 512 MiB after packing, and every node keeps a copy."""
_NAMED = 3
_NOT_FOR_RAY = (".gitignore", ".rayignore")  # Ray would leave out the tracked files that they name


@dataclass(frozen=True, kw_only=True)
class Package:
    """The files of one folder that are sent to a cluster."""

    root: Path
    files: tuple[Path, ...]
    """Relative to ``root``."""
    total_bytes: int
    untracked_code: tuple[Path, ...] = ()
    """Python files of the project's own packages that git doesn't track, relative to ``root``."""

    def __str__(self) -> str:
        return f"{counted(len(self.files), 'file')}, {_size(self.total_bytes)}"


class Code(Frozen):
    """Locations of the project's code on a node."""

    folder: str | None = None
    """Working directory of the workers if the node has it, relative to the one that Ray gives them."""
    paths: tuple[str, ...] = ()
    """Folders for ``sys.path``, relative to the working directory that Ray gives them, or absolute."""
    packages: tuple[str, ...] = ()
    """Top-level names of the project's own packages."""

    def enter(self) -> None:
        """Make the code importable in this process and its children, and enter the working directory."""
        base = Path.cwd()
        paths = [str(base / path) for path in self.paths]
        sys.path[:0] = [path for path in paths if path not in sys.path]
        os.environ["PYTHONPATH"] = python_path(*paths)
        if self.folder is not None and (base / self.folder).is_dir():
            os.chdir(base / self.folder)


def to_send(*, joined: bool) -> Package | None:
    """Return the package that a session sends to the cluster, or None if nothing has to be sent.

    Raises:
        ResourceError: git lists no files, or they are too large.
    """
    is_there_as_a_job = "working_dir" in os.environ.get(_JOB, "")
    if is_there_as_a_job or not (joined and own_packages()):
        return None
    return tracked(project_folder())


@contextmanager
def sent(package: Package | None, *, joined: bool) -> Iterator[tuple[Code, dict[str, Any]]]:
    """Yield the code's locations on the nodes, and Ray's ``runtime_env`` that sends it there."""
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


def project_folder() -> Path:
    """Return the folder of the nearest pyproject.toml with ``[tool.pipeline]``, or else the working directory."""
    file = project_file()
    return file.parent if file else Path.cwd()


def own_packages() -> tuple[str, ...]:
    """Return the top-level names of the project's own packages, from ``[tool.pipeline]``."""
    own = (name.partition(".")[0] for name in allowed_packages() if name not in BUILT_IN)
    return tuple(dict.fromkeys(own))


def import_roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders that the project's own packages need on ``sys.path``, relative to the project's folder.

    Packages that are installed elsewhere are left out: they have to be installed on other machines, too.
    """
    roots = (place.parent.relative_to(folder.resolve()) for place in _places(folder))
    return tuple(dict.fromkeys(roots))


def tracked(folder: Path, *, most_bytes: int = MOST_BYTES) -> Package:
    """Return the existing files below a folder that git tracks; links count as the files that they lead to.

    Raises:
        ResourceError: the folder is in no git repository, git tracks no file in it or nothing of one of the project's
            own packages, or the files exceed ``most_bytes``.
    """
    files = tuple(path for path in _listed(folder, "--cached", "--recurse-submodules") if (folder / path).is_file())
    if not files:
        raise ResourceError(f"{folder}: git tracks no file here, so no code can be sent to the cluster. Use git add.")
    own = [place.relative_to(folder.resolve()) for place in _places(folder)]
    if missing := [place.as_posix() for place in own if not any(path.is_relative_to(place) for path in files)]:
        raise ResourceError(
            f"{folder}: git does not track {', '.join(missing)}, which [tool.pipeline] lists, so the cluster would not "
            f"have this code. Use git add {shlex.join(missing)}."
        )
    sizes = {path: (folder / path).stat().st_size for path in files}
    package = Package(
        root=folder,
        files=files,
        total_bytes=sum(sizes.values()),
        untracked_code=tuple(_untracked_code(folder)),
    )
    if package.total_bytes > most_bytes:
        largest = sorted(files, key=sizes.__getitem__, reverse=True)[:_NAMED]
        named = ", ".join(f"{path} ({_size(sizes[path])})" for path in largest)
        raise ResourceError(
            f"{folder}: git tracks {package}. At most {_size(most_bytes)} are sent to a cluster. The largest files are "
            f"{named}. Put data on shared storage and git rm --cached it."
        )
    return package


@contextmanager
def staged(package: Package) -> Iterator[Path]:
    """Copy a package's files to a temporary folder.

    Raises:
        ResourceError: the files can't be copied.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-code-") as temporary:
        try:
            for path in package.files:
                if path.name not in _NOT_FOR_RAY:
                    target = Path(temporary, path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(package.root / path, target)
        except OSError as error:
            raise ResourceError(f"{package.root}: the code can't be copied for the cluster: {error}") from error
        yield Path(temporary)


def _places(folder: Path) -> Iterator[Path]:
    """Yield the paths of the project's own packages and modules that lie in its folder."""
    for name in own_packages():
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # a broken installation, reported when the component is built
            continue
        found = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())] if spec else []
        place = Path(found[0]).resolve() if found else None
        if place is not None and place.is_relative_to(folder.resolve()):
            yield place


def _untracked_code(folder: Path) -> Iterator[Path]:
    places = [place.relative_to(folder.resolve()) for place in _places(folder)]
    if not places:
        return
    for path in _listed(folder, "--others"):
        if path.suffix == ".py" and any(path.is_relative_to(place) for place in places):
            yield path


def _listed(folder: Path, *options: str) -> list[Path]:
    """Run ``git ls-files``; return paths relative to the folder.

    Raises:
        ResourceError: git is missing, or refuses.
    """
    command = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - the user's own git
    except OSError as error:
        raise ResourceError(f"git lists the code to send, but can't be run: {error}.") from None
    if done.returncode != 0:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"])[0]
        missing = "not a git repository" in said
        why = "is not in a git repository, which lists the code to send to the cluster" if missing else said
        raise ResourceError(f"{folder}: {why}.{' Use git init and git add.' if missing else ''}")
    return [Path(name.decode(errors="surrogateescape")) for name in done.stdout.split(b"\0") if name]


def _size(amount: int) -> str:
    return next(
        (f"{amount / unit:.0f} {name}" for unit, name in ((10**6, "MB"), (10**3, "kB")) if amount >= unit),
        f"{amount} bytes",
    )
