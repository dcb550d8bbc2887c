"""Optional packages of built-in components, missed before anything starts."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])

_ATTRIBUTE = "_pipeline_needs"


def needs(package: str) -> Callable[[Target], Target]:
    """Declare that a component needs a package, which is an extra of this project by the same name."""

    def declare(target: Target) -> Target:
        setattr(target, _ATTRIBUTE, package)
        return target

    return declare


def missing(target: object) -> str:
    """Return the message on the package that a component needs and that is not installed; empty if there is none."""
    package = getattr(target, _ATTRIBUTE, None)
    if not isinstance(package, str) or find_spec(package) is not None:
        return ""
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return f"{name} needs {package}, which is not installed: pip install 'ddp-pipeline[{package}]'"
