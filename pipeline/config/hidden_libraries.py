"""Files and folders of the user that hide a library: they have its name, and the working directory is searched first.

A process that has already imported a library keeps it. The processes that it starts import the user's file instead.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import BuiltinImporter, FrozenImporter
from pathlib import Path
from traceback import walk_tb

from pipeline.config.targets import BUILT_IN, allowed_packages
from pipeline.errors import UsageError

_LIBRARIES = frozenset(
    {
        *("fsspec", "jinja2", "lightning_utilities", "matplotlib", "mlflow", "numpy", "omegaconf", "pipeline"),
        *("psutil", "pydantic", "pynvml", "rich", "safetensors", "sklearn", "threadpoolctl", "torch", "torchmetrics"),
        *("typer", "typing_extensions", "yaml"),
        *("click", "filelock", "google", "packaging", "pandas", "requests", "scipy", "sqlalchemy", "sympy"),
        *("argparse", "mimetypes", "pprint", "profile", "tarfile", "unittest", "xml"),
    }
)
"""Libraries that the processes of each run import: those of ddp-pipeline except Ray, and some of torch and MLflow, with
modules of Python that are imported late."""


def check_libraries(*, launcher: str, before_user_code: bool) -> None:
    """Check that no file or folder of the working directory, or of its src/, hides a library that a run imports.

    The project's own packages, of ``[tool.pipeline]``, may replace a library, but not pipeline.

    Args:
        launcher: launcher of the run; ``ray`` imports Ray.
        before_user_code: True if only libraries were imported here since the folder is on ``sys.path``. Otherwise a
            module with the name of one of Python's may be imported from there on purpose.

    Raises:
        UsageError: names what hides a library.
    """
    own = {name.partition(".")[0] for name in allowed_packages() if name not in BUILT_IN}
    libraries = (_LIBRARIES - own) | {"pipeline"} | ({"ray"} if launcher == "ray" else set())

    def is_needed(path: Path, name: str) -> bool:
        is_imported = name in sys.modules and (before_user_code or not _is_loaded_from(path, name))
        return name in libraries or (_is_pythons(name) and is_imported)

    if hiding := [found for found in _find_modules() if is_needed(*found)]:
        raise _error(hiding)


def explain_failed_import(error: Exception) -> UsageError | None:
    """Return an error that names what hides a library, if an import has failed because of it."""
    files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}

    def is_cause(path: Path, name: str) -> bool:
        return _is_loaded_from(path, name) or str(_source(path)) in files

    hiding = [found for found in _find_modules() if is_cause(*found)]
    return _error(hiding) if hiding else None


def _find_modules() -> Iterator[tuple[Path, str]]:
    """Yield what has the name of a library in the working directory and its src/, with that name; not pipeline itself.

    A folder without __init__.py hides nothing, nor does a file with the name of a built-in module such as time.
    """
    names = {name for name in sys.stdlib_module_names if not _is_built_in(name)} | _LIBRARIES | {"ray"}
    for place in (Path.cwd(), Path.cwd() / "src"):
        with suppress(OSError):  # there is no src/, or it can't be listed
            for path in sorted(place.iterdir()):
                name = path.name.removesuffix(".py")  # a folder queue.old hides nothing
                if name in names and _source(path).is_file() and not (path / "worker" / "main.py").is_file():
                    yield path, name


def _source(path: Path) -> Path:
    return path if path.suffix == ".py" else path / "__init__.py"


def _is_pythons(name: str) -> bool:
    return name in sys.stdlib_module_names


def _is_built_in(name: str) -> bool:
    """Return True for a module that Python finds before it looks into folders."""
    return BuiltinImporter.find_spec(name) is not None or FrozenImporter.find_spec(name) is not None


def _is_loaded_from(path: Path, name: str) -> bool:
    return getattr(sys.modules.get(name), "__file__", None) == str(_source(path))


def _error(hiding: Iterable[tuple[Path, str]]) -> UsageError:
    lines = []
    for path, name in hiding:
        library = f"Python's module {name}" if _is_pythons(name) else f"the library {name}"
        lines.append(f"{path.relative_to(Path.cwd())}: is imported instead of {library}. Rename it.")
    return UsageError("\n".join(lines))
