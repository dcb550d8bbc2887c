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
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
    return lacking(name, package) if isinstance(package, str) else ""


def lacking(what: str, package: str, *, extra: str = "") -> str:
    """Return the message that ``what`` needs a package, which ``extra`` installs; empty if it is installed.

    By default the extra has the name of the package.
    """
    if find_spec(package) is not None:
        return ""
    return f"{what} needs {package}, which is not installed: pip install 'ddp-pipeline[{extra or package}]'"
