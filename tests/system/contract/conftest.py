"""Two ranks that serve all tests of a file."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
