"""Tests of one process and one thread: the tier runs as many at once as there are cores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="session", autouse=True)
def _hypothesis_in_use() -> None:
    """Let Hypothesis read Unicode's tables and the code's constants: in a fresh clone its first test would pay 1 s."""

    @given(st.text())
    def draw(_: str) -> None:
        pass

    draw()


@pytest.fixture(scope="module", autouse=True)
def _with_one_thread() -> None:
    """A training of another tier may have set more in this process."""
    torch.set_num_threads(1)
