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
from typing import Any, NamedTuple, NoReturn, TypeVar

from pipeline.errors import ExperimentError, UnguardedScriptError, UsageError
from pipeline.system import undisturbed
from pipeline.wording import did_you_mean, nearest

Target = TypeVar("Target", bound=Callable[..., Any])

BUILT_IN = (
    "torch.nn",
    "torch.optim",
    "torch.utils.data",
    "torchmetrics",
    "torchvision.models",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.ops",
    "timm.models",
    "transformers.models",
    "pipeline.models",
    "pipeline.data",
    "pipeline.tasks",
    *("torch.arange", "torch.full", "torch.linspace", "torch.ones", "torch.tensor", "torch.zeros"),
)
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

_importing: list[str] = []
"""Modules of components that are being imported."""


def allowed_packages(start: Path | None = None) -> tuple[str, ...]:
    """Return the built-in packages and those of the project around ``start`` (default: the working directory).

    Raises:
        UsageError: the pyproject.toml or its ``[tool.pipeline]`` is malformed.
    """
    if (file := project_file(start)) is None:
        return BUILT_IN
    right, section = 'write packages = ["myproject"]', _tools(file)["pipeline"]
    if not isinstance(section, dict):
        raise UsageError(f"{file}: tool.pipeline is {section!r}, not a section; below [tool.pipeline] {right}")
    for key in section:
        if key != "packages":
            hint = did_you_mean(key, ["packages"]) or f"; {right}"
            raise UsageError(f"{file}: [tool.pipeline] has an unknown key {key}{hint}")
    packages = section.get("packages", [])
    if not isinstance(packages, list):
        raise UsageError(f"{file}: [tool.pipeline] packages is {packages!r}, not a list; {right}")
    for package in packages:
        if not (isinstance(package, str) and all(part.isidentifier() for part in package.split("."))):
            raise UsageError(f"{file}: [tool.pipeline] packages has {package!r}, not the name of a package; {right}")
    return tuple(dict.fromkeys((*BUILT_IN, *packages)))


def project_file(start: Path | None = None) -> Path | None:
    """Find the nearest pyproject.toml with a ``[tool.pipeline]`` section, from ``start`` upwards.

    Raises:
        UsageError: a pyproject.toml on the way is malformed.
    """
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
    """Check that neither a component's module nor the script of a parent process is being imported now.

    Raises:
        UnguardedScriptError: a script would train again when it is imported.
    """
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


def find(target: str, *, key: str, allowed: tuple[str, ...]) -> Callable[..., Any]:
    """Return the class or function that ``target`` names.

    Raises:
        ExperimentError: not allowed, not installed, not found, not callable, or its package can't be imported.
    """
    return _Search(target, f"{key}._target_", allowed).result()


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


class _Search(NamedTuple):
    target: str
    key: str
    allowed: tuple[str, ...]

    def result(self) -> Callable[..., Any]:
        self._refuse_name()
        root, *rest = self.target.split(".")
        found: object = self._import(root)
        in_class = False
        for n, part in enumerate(rest, 1):
            in_class = in_class or inspect.isclass(found)
            found = self._step(found, part, ".".join([root, *rest[:n]]))
        return self._accept(found, in_class=in_class)

    def _refuse_name(self) -> None:
        root, *rest = self.target.split(".")
        if root == "__main__":
            self._fail(
                f"{self.target} is defined in a notebook or a script, so workers cannot import it. Move it into a "
                f"module in the same folder, e.g. net.py, and write net.{rest[-1]}."
            )
        roots = {package.partition(".")[0] for package in self.allowed}
        if any(part.startswith("_") for part in (root, *rest)):
            self._fail(f"{self.target} is private: names that start with an underscore cannot be used")
        # A name directly in the root may be re-exported from an allowed package: transformers.ResNetConfig.
        if (root in roots and len(rest) == 1) or _under(self.target, self.allowed):
            return
        is_misspelt = root not in roots and root not in sys.modules and find_spec(root) is None
        if is_misspelt and (meant := nearest(root, roots, cutoff=0.75)):
            self._fail(f"{root} is not an allowed package; did you mean {'.'.join((meant, *rest))}?")
        own = "myproject" if root in roots or root in sys.stdlib_module_names else root
        packages = json.dumps([*(package for package in self.allowed if package not in BUILT_IN), own])
        self._fail(
            f"{self.target} is not in an allowed package. "
            f"To allow your package, write packages = {packages} below [tool.pipeline] in pyproject.toml."
        )

    def _step(self, found: object, part: str, name: str) -> object:
        if isinstance(found, ModuleType):
            if not _under(found.__name__, self.allowed, or_around=True):
                self._fail(f"{self.target} leads to the module {found.__name__}, which is not in an allowed package")
            try:
                inner = getattr(found, part, None)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - lazy modules import when asked, which runs any code
                self._import_failed(name, error)
            if inner is None and hasattr(found, "__path__") and _under(name, self.allowed, or_around=True):
                return self._import(name)
        elif inspect.isclass(found):
            inner = getattr(found, part, None)
        else:
            self._fail(f"{self.target}: {name.rpartition('.')[0]} is not a module or a class")
        return self._not_there(found, part) if inner is None else inner

    def _import(self, name: str) -> ModuleType:
        _importing.append(name)
        try:
            with undisturbed():
                return importlib.import_module(name)
        except UnguardedScriptError:  # one sentence, rather than one for each component
            raise
        except ModuleNotFoundError as error:
            if error.name != name:
                self._import_failed(name, error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - importing runs the user's code
            self._import_failed(name, error)
        finally:
            _importing.pop()
        return self._not_found(name)

    def _not_found(self, name: str) -> NoReturn:
        parent, _, part = name.rpartition(".")
        if parent:
            self._not_there(sys.modules[parent], part)
        if any(package not in BUILT_IN and _under(package, (name,)) for package in self.allowed):
            self._fail(f"package {name} not found. Run in your project's folder, or install it: pip install -e .")
        self._fail(f"{name} is not installed. Install it, or name another package.")

    def _accept(self, found: object, *, in_class: bool) -> Callable[..., Any]:
        if isinstance(found, ModuleType):
            inside = ", ".join(_own(found)[:8]) or "no public names"
            self._fail(f"{self.target} is a module, not a class or function. It defines {inside}.")
        if not callable(found) or not isinstance(getattr(found, "__qualname__", None), str):
            self._fail(f"{self.target} is not a class or function")
        if self.target in self.allowed:  # allowed by its own name, wherever it is defined
            return found
        home, own = str(getattr(found, "__module__", None)), set(self.allowed) - set(BUILT_IN)
        remedy = (
            f"To use it, call {self.target} in a function of your package, and name that function here. "
            'To allow your package, write packages = ["myproject"] below [tool.pipeline] in pyproject.toml.'
        )
        if not _under(home, self.allowed):
            self._fail(f"{self.target} is defined in {home}, which is not allowed. {remedy}")
        if _under(home, own):
            return found
        if in_class or inspect.ismethod(found):
            self._fail(f"{self.target} is a method. Only methods of the project's packages can be used.")
        if _under(home, _RUN_CODE):
            self._fail(f"{self.target} can load and run code. {remedy}")
        return found

    def _not_there(self, where: ModuleType | type, part: str) -> NoReturn:
        loaded = {package: sys.modules[package] for package in self.allowed if package in sys.modules}
        root = where.__name__.partition(".")[0]
        elsewhere = [name for name, module in loaded.items() if part in vars(module) and _under(name, (root,))]
        near = did_you_mean(part, _own(where)) or did_you_mean(part, _public(where))
        hint = f"; did you mean {elsewhere[0]}.{part}?" if elsewhere else near
        self._fail(f"{where.__name__} has no {part}{hint}")

    def _import_failed(self, name: str, error: BaseException) -> NoReturn:
        cause = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:200]
        place = own_place(error, name.partition(".")[0])
        self._fail(f"importing {name} failed: {type(error).__name__}: {cause}{place}", cause=error)

    def _fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        raise ExperimentError.of(self.key, message) from cause


def _under(name: str, packages: Iterable[str], *, or_around: bool = False) -> bool:
    """Return True if a dotted name lies in one of the packages, or if it contains one of them."""
    return any(f"{name}.".startswith(f"{p}.") or (or_around and p.startswith(f"{name}.")) for p in packages)


def _public(owner: ModuleType | type) -> list[str]:
    names = getattr(owner, "__all__", None) or dir(owner)
    return [name for name in names if not name.startswith("_")]


def _own(module: ModuleType | type) -> list[str]:
    """Return the public names that are defined in a module or in its submodules."""
    homes = {name: str(getattr(vars(module).get(name), "__module__", "")) for name in _public(module)}
    return [name for name, home in homes.items() if _under(home, [module.__name__])]
