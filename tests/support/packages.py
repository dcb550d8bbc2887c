"""Optional packages that tests import: make installs them, so a missing one is a failure there, not a skip."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

VARIABLE = "MISSING_PACKAGES_FAIL"  # In the environment if make runs the tests
UNPINNED = ("torchvision", "litdata")
"""Packages that make doesn't install: each build of torch needs another build of torchvision, which pip doesn't
consider, and LitData requires torchvision. With the wrong build, importing transformers fails."""

_import_or_skip = pytest.importorskip


def pytest_configure() -> None:
    pytest.importorskip = _import


def is_installed(package: str) -> bool:
    """Return True if a package is installed; fail the test if make should have installed it."""
    found = find_spec(package) is not None
    if not found:
        _fail_if_installed_by_make(package, f"{package} is not installed")
    return found


def _import(name: str, *arguments: Any, **options: Any) -> Any:
    try:
        return _import_or_skip(name, *arguments, **options)
    except pytest.skip.Exception as error:
        skipped = error
    _fail_if_installed_by_make(name.partition(".")[0], str(skipped))
    raise skipped


def _fail_if_installed_by_make(package: str, message: str) -> None:
    if VARIABLE in os.environ and package not in UNPINNED:
        pytest.fail(f"{message}. make test-slow installs it: test-slow in pyproject.toml", pytrace=False)
