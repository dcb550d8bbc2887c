"""What stays together where pytest-xdist spreads files over processes: those that look at one costly thing.

By file, since xdist 3.8 doesn't see its own `xdist_group` marks under pytest 9.2: it writes them into an attribute of a
test that no longer gives the test's name, and ``--dist=loadgroup`` spreads each test by itself.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

TOGETHER = {
    "launched: ": "launched",
    "LauncherContract": "launched",
    "whole_run: ": "launched",
    "from ranks import": "ranks",
}
"""What files share, by what stands in them: sessions of launchers, a whole run, a server that ranks are forked from.

The others go file by file.
"""
COSTLY = ("whole_run", "launched", "undisturbed")  # Fixtures of a session, the longest first; who looks at them begins


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: COSTLY.index(costly) if (costly := _costly(item)) else len(COSTLY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, and some files together."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _group(config.rootpath / file) or file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def _group(file: Path) -> str:
    source = file.read_text(encoding="utf-8")
    return next((group for words, group in TOGETHER.items() if words in source), "")


def _costly(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ())
    return next((name for name in COSTLY if name in names), "")
