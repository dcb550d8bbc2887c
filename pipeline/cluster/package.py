"""A project's code on its way to other machines: the files that git tracks, as they are in the working tree.

What git doesn't track (data, environments, secrets in an ``.env``) stays where it is.
"""

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.project import BUILT_IN, allowed_packages, project_file
from pipeline.errors import ResourceError
from pipeline.wording import counted

MOST_BYTES = 100_000_000
"""Ray's own limit is 512 MiB once it is packed, and every node keeps a copy."""
_NAMED = 3
_NOT_FOR_RAY = (".gitignore", ".rayignore")  # it would leave out tracked files that these name


@dataclass(frozen=True, kw_only=True)
class Package:
    """Files of one folder."""

    root: Path
    files: tuple[Path, ...]
    """Relative to ``root``."""
    total_bytes: int
    untracked_code: tuple[Path, ...] = ()
    """Python files of the project's own packages that are left out, relative to ``root``."""

    def __str__(self) -> str:
        return f"{counted(len(self.files), 'file')}, {_size(self.total_bytes)}"


def project_folder() -> Path:
    """The folder of the nearest pyproject.toml with ``[tool.pipeline]``; without one the working directory."""
    file = project_file()
    return file.parent if file else Path.cwd()


def own_packages() -> tuple[str, ...]:
    """Top-level names of the project's own packages, from ``[tool.pipeline]``."""
    own = (name.partition(".")[0] for name in allowed_packages() if name not in BUILT_IN)
    return tuple(dict.fromkeys(own))


def import_roots(folder: Path) -> tuple[Path, ...]:
    """Folders that have to be on ``sys.path`` for the project's own packages, relative to the project's folder.

    Packages that are installed elsewhere are left out: they have to be installed on other machines, too.
    """
    roots = (place.parent.relative_to(folder.resolve()) for place in _places(folder))
    return tuple(dict.fromkeys(roots))


def tracked(folder: Path, *, most_bytes: int = MOST_BYTES) -> Package:
    """All files below a folder that git tracks and that are there; a link counts as the file that it leads to.

    Raises:
        ResourceError: the folder is in no git repository, git tracks nothing in it, or it is too much.
    """
    files = tuple(path for path in _listed(folder, "--cached", "--recurse-submodules") if (folder / path).is_file())
    if not files:
        raise ResourceError(
            f"{folder}: git tracks no file here, so there is no code to send to the cluster; {_remedy('git add')}"
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
            f"{folder}: git tracks {package}, and at most {_size(most_bytes)} are sent to a cluster; the largest are "
            f"{named}; {_remedy('put data on shared storage and git rm --cached it')}"
        )
    return package


@contextmanager
def staged(package: Package) -> Iterator[Path]:
    """A temporary folder with just the package's files.

    Raises:
        ResourceError: they can't be copied.
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
    """The project's own packages and modules that lie in its folder."""
    for name in own_packages():
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # a broken installation; building the component will say so
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
    """What ``git ls-files`` lists below a folder, relative to it."""
    command = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - the user's own git
    except OSError as error:
        raise ResourceError(f"git can't be run, which tells what code to send: {error}; {_remedy('')}") from None
    if done.returncode != 0:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["git failed"])[0]
        missing = "not a git repository" in said
        why = "is in no git repository, which would tell what code to send to the cluster" if missing else said
        raise ResourceError(f"{folder}: {why}; {_remedy('git init and git add' if missing else '')}")
    return [Path(name.decode(errors="surrogateescape")) for name in done.stdout.split(b"\0") if name]


def _remedy(first: str) -> str:
    shared = "parallel.ship_code: false where all nodes have the code at the same path, e.g. on shared storage"
    return f"{first}, or write {shared}" if first else f"write {shared}"


def _size(amount: int) -> str:
    return next(
        (f"{amount / unit:.0f} {name}" for unit, name in ((10**6, "MB"), (10**3, "kB")) if amount >= unit),
        f"{amount} bytes",
    )
