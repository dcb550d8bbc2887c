"""Tests of processes, of which several run at once."""

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def _with_one_thread() -> None:
    """Threads of a small model wait for each other on a busy machine, and take processor time while they do."""
    if torch := sys.modules.get("torch"):  # not in test_lint.py
        torch.set_num_threads(1)
