"""Lookup of a ``_target_``: from a dotted name to a class or function, if an experiment file may name it.

A file that names a callable runs code. So the name must start with an allowed package, a built-in one or one of the
project's pyproject.toml, before anything is imported. The callable must be defined in an allowed package:
``torch.nn.modules.module.torch.hub.load`` is not. Of built-in packages, `_RUN_CODE` is refused.
"""

import importlib
import inspect
import json
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeVar, cast

from pipeline.errors import ExperimentError, UnguardedScriptError, UsageError
from pipeline.system import undisturbed
from pipeline.wording import did_you_mean, nearest

Target = TypeVar("Target", bound=Callable[..., Any])

_LIBRARIES = "torch.nn torch.optim torch.utils.data torchmetrics timm.models transformers.models"
_OF_TORCHVISION = "torchvision.models torchvision.datasets torchvision.transforms torchvision.ops"
_OWN = "pipeline.models pipeline.data pipeline.tasks"
_FUNCTIONS = "torch.arange torch.full torch.linspace torch.ones torch.tensor torch.zeros"
BUILT_IN = tuple(f"{_LIBRARIES} {_OF_TORCHVISION} {_OWN} {_FUNCTIONS}".split())
"""Packages that are always allowed, and single functions and classes of other packages."""
_RUN_CODE = (
    "timm.models._helpers",  # unpickle checkpoints
    "timm.models._hub",
    "torch.utils.data.datapipes",  # write files, and unpickle what they read
    "torchmetrics.functional.multimodal.clip_iqa",  # set trust_remote_code for some names of models
    "torchmetrics.functional.multimodal.clip_score",
    "torchmetrics.functional.text.bert",  # load any model by its name, and ask on the terminal whether to run its code
    "torchmetrics.functional.text.infolm",
    "torchmetrics.multimodal.clip_iqa",
    "torchmetrics.multimodal.clip_score",
    "torchmetrics.text.bert",
    "torchmetrics.text.infolm",
    "torchvision.datasets.lsun",  # unpickles a cache file
    "torchvision.datasets.utils",  # download and unpack files
)
"""Modules of built-in packages that can run or fetch code: at most 20."""
_NEEDS = "_pipeline_needs"
_FILE = "pyproject.toml"

_importing: list[str] = []  # Modules of components that are being imported


def allowed_packages(start: Path | None = None) -> tuple[str, ...]:
    """Return the built-in packages and those of the project around ``start`` (default: the working directory)."""
    if (file := project_file(start)) is None:
        return BUILT_IN
    section = _tools(file)["pipeline"]
    packages = section.get("packages", []) if isinstance(section, dict) and section.keys() <= {"packages"} else None
    names = packages if isinstance(packages, list) else [""]
    if not all(isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in names):
        right = 'write packages = ["myproject"], a list of names of packages, and nothing else'
        raise UsageError(f"{file}: tool.pipeline is {section!r}; below [tool.pipeline] {right}")
    return tuple(dict.fromkeys((*BUILT_IN, *names)))


def project_file(start: Path | None = None) -> Path | None:
    """Find the nearest pyproject.toml with a ``[tool.pipeline]`` section, from ``start`` upwards."""
    folder = (start or Path.cwd()).resolve()
    candidates = (parent / _FILE for parent in (folder, *folder.parents))
    return next((file for file in candidates if file.is_file() and "pipeline" in _tools(file)), None)


def _tools(file: Path) -> dict[str, object]:
    try:
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UsageError(f"{file}: can't be read: {error}") from None
    return tools if isinstance(tools, dict) else {}


def check_not_importing() -> None:
    """Check that neither a component's module nor the script of a parent process is being imported now."""
    import multiprocessing

    # as multiprocessing itself checks, in a process that it spawned
    is_spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if _importing or is_spawned:
        name = _importing[-1] if _importing else sys.argv[0]
        raise UnguardedScriptError(
            f"{name}: run() or compare() is called while this module is imported. Put the call below "
            'if __name__ == "__main__": so that an import does not start another training.'
        )


# Optional packages


def needs(package: str) -> Callable[[Target], Target]:
    """Declare that a component needs one of the optional packages."""

    def declare(target: Target) -> Target:
        setattr(target, _NEEDS, package)
        return target

    return declare


def find_missing_package(target: object) -> str:
    """Return the message on the package that a component needs and that is not installed; empty if there is none."""
    package = getattr(target, _NEEDS, None)
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return lacking(name, package) if isinstance(package, str) else ""


def lacking(what: str, package: str) -> str:
    """Return the message that ``what`` needs an optional package; empty if it is installed."""
    return "" if find_spec(package) else f"{what} needs {package}, which is not installed: {install_command(package)}"


def install_command(*packages: str) -> str:
    """Return the command that installs optional packages; this project itself is on no index."""
    return f"pip install {shlex.join(packages)}"


# Names


class _UnusableError(Exception):
    """Reason why a name can't be used."""


def find(target: str, *, key: str, allowed: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class or function that ``target`` names."""
    try:
        _check_name(target, allowed)
        root, *rest = target.split(".")
        found: Any = _import(root, allowed)
        in_class = False
        for n, part in enumerate(rest, 1):
            in_class = in_class or inspect.isclass(found)
            found = _look_up(found, part, ".".join([root, *rest[:n]]), target, allowed)
        _check_found(found, target, allowed, is_method=in_class or inspect.ismethod(found))
    except _UnusableError as error:
        raise ExperimentError.of(f"{key}._target_", str(error)) from error.__cause__
    return cast("Callable[..., Any]", found)


def own_place(error: BaseException, root: str) -> str:
    """Return the last line of a package's own code in the traceback, e.g. " (model.py:3)"; empty without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    own = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == root
    ]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""


def _check_name(target: str, allowed: tuple[str, ...]) -> None:
    """Check a name before anything is imported."""
    root, *rest = target.split(".")
    if root == "__main__":
        raise _UnusableError(
            f"{target} is defined in a notebook or a script, so workers cannot import it. Move it into a "
            f"module in the same folder, e.g. net.py, and write net.{rest[-1]}."
        )
    if any(part.startswith("_") for part in (root, *rest)):
        raise _UnusableError(f"{target} is private: names that start with an underscore cannot be used")
    roots = {package.partition(".")[0] for package in allowed}
    # A name directly in the root may be re-exported from an allowed package: transformers.ResNetConfig.
    if (root in roots and len(rest) == 1) or _is_in(target, allowed):
        return
    is_misspelt = root not in roots and root not in sys.modules and find_spec(root) is None
    if is_misspelt and (meant := nearest(root, roots, cutoff=0.75)):
        raise _UnusableError(f"{root} is not an allowed package; did you mean {'.'.join((meant, *rest))}?")
    own = "myproject" if root in roots or root in sys.stdlib_module_names else root
    packages = json.dumps([*(package for package in allowed if package not in BUILT_IN), own])
    allow = f"To allow your package, write packages = {packages} below [tool.pipeline] in pyproject.toml."
    raise _UnusableError(f"{target} is not in an allowed package. {allow}")


def _look_up(found: Any, part: str, name: str, target: str, allowed: tuple[str, ...]) -> Any:
    """Return what a module or a class calls ``part``; import it if it is a module."""
    if not isinstance(found, ModuleType | type):
        raise _UnusableError(f"{target}: {name.rpartition('.')[0]} is not a module or a class")
    is_module = isinstance(found, ModuleType)
    if is_module and not _is_in(found.__name__, allowed, or_around=True):
        raise _UnusableError(f"{target} leads to the module {found.__name__}, which is not in an allowed package")
    try:
        inner = getattr(found, part, None)
    except (Exception, SystemExit) as error:
        raise _UnusableError(_explain_import(name, error)) from error
    if inner is not None:
        return inner
    if is_module and hasattr(found, "__path__") and _is_in(name, allowed, or_around=True):
        return _import(name, allowed)
    raise _UnusableError(_explain_missing(found, part, allowed))


def _import(name: str, allowed: tuple[str, ...]) -> ModuleType:
    _importing.append(name)
    try:
        with undisturbed():
            return importlib.import_module(name)
    except UnguardedScriptError:  # one sentence, rather than one for each component
        raise
    except (Exception, SystemExit) as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != name:
            raise _UnusableError(_explain_import(name, error)) from error
    finally:
        _importing.pop()
    parent, _, part = name.rpartition(".")
    if parent:
        raise _UnusableError(_explain_missing(sys.modules[parent], part, allowed))
    if any(package not in BUILT_IN and _is_in(package, (name,)) for package in allowed):
        raise _UnusableError(f"package {name} not found. Run in your project's folder, or install it: pip install -e .")
    raise _UnusableError(f"{name} is not installed. Install it, or name another package.")


def _check_found(found: Any, target: str, allowed: tuple[str, ...], *, is_method: bool) -> None:
    """Check that what a name leads to is defined in an allowed package."""
    if isinstance(found, ModuleType):
        inside = ", ".join(_own_names(found)[:8]) or "no public names"
        raise _UnusableError(f"{target} is a module, not a class or function. It defines {inside}.")
    if not callable(found) or not isinstance(getattr(found, "__qualname__", None), str):
        raise _UnusableError(f"{target} is not a class or function")
    home, own = str(getattr(found, "__module__", None)), set(allowed) - set(BUILT_IN)
    if target in allowed or _is_in(home, own):  # allowed by its own name, wherever it is defined
        return
    remedy = (
        f"To use it, call {target} in a function of your package, and name that function here. "
        'To allow your package, write packages = ["myproject"] below [tool.pipeline] in pyproject.toml.'
    )
    if not _is_in(home, allowed):
        raise _UnusableError(f"{target} is defined in {home}, which is not allowed. {remedy}")
    if is_method:
        raise _UnusableError(f"{target} is a method. Only methods of the project's packages can be used.")
    if _is_in(home, _RUN_CODE):
        raise _UnusableError(f"{target} can load and run code. {remedy}")


def _explain_missing(where: ModuleType | type, part: str, allowed: tuple[str, ...]) -> str:
    root = where.__name__.partition(".")[0]
    loaded = {name: sys.modules[name] for name in allowed if name in sys.modules and _is_in(name, (root,))}
    elsewhere = next((f"; did you mean {name}.{part}?" for name, module in loaded.items() if part in vars(module)), "")
    hint = elsewhere or did_you_mean(part, _own_names(where)) or did_you_mean(part, _public_names(where))
    return f"{where.__name__} has no {part}{hint}"


def _explain_import(name: str, error: BaseException) -> str:
    cause = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:200]
    return f"importing {name} failed: {type(error).__name__}: {cause}{own_place(error, name.partition('.')[0])}"


def _is_in(name: str, packages: Iterable[str], *, or_around: bool = False) -> bool:
    """Return True if a dotted name lies in one of the packages, or if it contains one of them."""
    return any(f"{name}.".startswith(f"{p}.") or (or_around and p.startswith(f"{name}.")) for p in packages)


def _public_names(owner: ModuleType | type) -> list[str]:
    return [name for name in getattr(owner, "__all__", None) or dir(owner) if not name.startswith("_")]


def _own_names(owner: ModuleType | type) -> list[str]:
    """Return the public names that are defined in a module or in its submodules."""
    homes = {name: str(getattr(vars(owner).get(name), "__module__", "")) for name in _public_names(owner)}
    return [name for name, home in homes.items() if _is_in(home, [owner.__name__])]
