"""Packages that a ``_target_`` may name: built-in ones, and the project's own from its pyproject.toml."""

import tomllib
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.wording import did_you_mean

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
    "ray.data.read_csv",
    "ray.data.read_images",
    "ray.data.read_json",
    "ray.data.read_numpy",
    "ray.data.read_parquet",
    "ray.data.FileShuffleConfig",
)
"""Packages whose classes and functions build objects without side effects, and single functions of other packages."""

_NAME = "pyproject.toml"


def allowed_packages(start: Path | None = None) -> tuple[str, ...]:
    """Return the built-in packages and those of the project around ``start`` (default: the working directory).

    Raises:
        UsageError: the pyproject.toml or its ``[tool.pipeline]`` is malformed.
    """
    file = project_file(start)
    own = _packages(file) if file else ()
    return (*BUILT_IN, *(package for package in own if package not in BUILT_IN))


def project_file(start: Path | None = None) -> Path | None:
    """Find the nearest pyproject.toml with a ``[tool.pipeline]`` section, from ``start`` upwards.

    Raises:
        UsageError: a pyproject.toml on the way is malformed.
    """
    folder = (start or Path.cwd()).resolve()
    candidates = (parent / _NAME for parent in (folder, *folder.parents))
    return next((file for file in candidates if file.is_file() and "pipeline" in _tools(file)), None)


def _tools(file: Path) -> dict[str, object]:
    try:
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UsageError(f"{file}: can't be read: {error}") from None
    return tools if isinstance(tools, dict) else {}


def _packages(file: Path) -> tuple[str, ...]:
    section = _tools(file)["pipeline"]
    right = 'write packages = ["myproject"]'
    if not isinstance(section, dict):
        raise UsageError(f"{file}: tool.pipeline is {section!r}, not a section; below [tool.pipeline] {right}")
    for key in section:
        if key != "packages":
            hint = did_you_mean(key, ["packages"])
            raise UsageError(f"{file}: [tool.pipeline] has an unknown key {key}{hint or f'; {right}'}")
    packages = section.get("packages", [])
    if not isinstance(packages, list):
        raise UsageError(f"{file}: [tool.pipeline] packages is {packages!r}, not a list; {right}")
    for package in packages:
        if not (isinstance(package, str) and all(part.isidentifier() for part in package.split("."))):
            raise UsageError(f"{file}: [tool.pipeline] packages has {package!r}, not the name of a package; {right}")
    return tuple(packages)
