"""What the tests share stands in tests/support."""

import gc
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # which no test would use, 3 s of processor time

pytest_plugins = [
    "leaks", "cost", "groups", "command", "launched", "recordings", "attempts", "s3", "baking", "packages",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])  # unit, system or slow


def pytest_collection_finish() -> None:
    """Leave out what was imported: each collection of garbage would look through all of it, a third of a second."""
    gc.collect()
    gc.freeze()
