"""Every template with pairwise-complete answers."""

import pytest
from baking import Baked, bake, combinations

from pipeline.scaffold import catalog


@pytest.fixture(scope="session")
def baked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Baked, ...]:
    """Every template with pairwise-complete answers, all in one folder."""
    parent = tmp_path_factory.mktemp("baked")
    return tuple(
        bake(parent / f"{template.replace('-', '')}-{number:02}", template, **answers)
        for template in catalog.names()
        for number, answers in enumerate(combinations(template))
    )
