"""Optional packages, and the messages about missing packages, before anything starts."""

import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])

OPTIONAL_PACKAGES: Mapping[str, str] = {
    "cookiecutter": "pipeline new",
    "lightning": "pipeline.tasks.Lightning",
    "onnx": "pipeline export --onnx",
    "onnxscript": "pipeline export --onnx",
    "optuna": "sweep: {search: optuna}",
    "s3fs": "checkpoint.directory: s3://...",
    "tensorboard": "tracking.loggers: [tensorboard]",
    "transformers": "pipeline.models.pretrained, pipeline.data.texts",
    "wandb": "tracking.loggers: [wandb]",
}
"""Features that need an optional package, by the name of the package on the package index.

This project is on no index: a command that names it or its extras would run the code of whoever registers the name."""
_ATTRIBUTE = "_pipeline_needs"


def needs(package: str) -> Callable[[Target], Target]:
    """Declare that a component needs one of the optional packages."""

    def declare(target: Target) -> Target:
        setattr(target, _ATTRIBUTE, package)
        return target

    return declare


def missing(target: object) -> str:
    """Return the message on the package that a component needs and that is not installed; empty if there is none."""
    package = getattr(target, _ATTRIBUTE, None)
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return lacking(name, package) if isinstance(package, str) else ""


def lacking(what: str, package: str) -> str:
    """Return the message that ``what`` needs an optional package; empty if it is installed."""
    return "" if find_spec(package) else f"{what} needs {package}, which is not installed: {install_command(package)}"


def install_command(*packages: str) -> str:
    """Return the command that installs optional packages."""
    assert OPTIONAL_PACKAGES.keys() >= {*packages}
    return f"pip install {shlex.join(packages)}"
