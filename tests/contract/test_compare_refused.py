"""Wishes for a comparison that can't be met."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategies", "single,dpp"], "--strategies single,dpp: 'dpp' is not a strategy; did you mean dp?"),
        (["--workers", "1,0"], "--workers 1,0: '0' is not a number of workers. Use numbers of at least 1, e.g. 1,2,4."),
        (["--workers", "two"], "--workers two: 'two' is not a number of workers"),
        (["--workers", ""], "--workers : '' is not a number of workers"),
        (["--repeats", "0"], "should be greater than or equal to 1"),
    ],
)
def test_bad_wishes(command: Any, arguments: list[str], told: str) -> None:
    ended = command("compare", "lab.yaml", *arguments)
    assert ended.code == 2
    assert told in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.output
