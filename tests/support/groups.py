"""What stays together where pytest-xdist spreads tests: a file, or all that look at one costly thing."""

import pytest

COSTLY = ("whole_run", "launched", "undisturbed")
"""Fixtures of a session, the longest first; who looks at them begins."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        costly = _costly(item)
        item.add_marker(pytest.mark.xdist_group(costly or item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: COSTLY.index(costly) if (costly := _costly(item)) else len(COSTLY))


def _costly(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ())
    return next((name for name in COSTLY if name in names), "")
