"""Tests of one process and one thread: the tier runs as many at once as there are cores."""

import gc

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave out what was imported: each collection of garbage would look through all of it, a third of a second."""
    gc.collect()
    gc.freeze()
