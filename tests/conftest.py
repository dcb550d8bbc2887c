"""What the tests share stands in tests/support."""

import gc

pytest_plugins = [
    "leaks", "cost", "groups", "command", "launched", "census", "recordings", "attempts", "s3", "baking", "packages",
]  # fmt: skip


def pytest_collection_finish() -> None:
    """Leave out what was imported: each collection of garbage would look through all of it, a third of a second."""
    gc.collect()
    gc.freeze()
