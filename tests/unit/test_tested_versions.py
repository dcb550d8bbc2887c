"""Ranges of versions: what was run, and the page that shows it."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "status.md").read_text()


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS)
        return runpy.run_path(str(TESTS / "versions.py"))


def written(script: dict[str, Any], **ran: Any) -> str:
    """The page after some environments were run."""
    lines = {name: script["read_lines"](name, PAGE) for name in script["CELLS"]}
    lines |= {name: script["lines_of"](name, one) for name, one in ran.items()}
    return "\n".join([*script["page"](lines), ""])


def test_environments_that_are_not_run_keep_their_lines(script: dict[str, Any]) -> None:
    block = PAGE.partition(script["BEGIN"])[2].partition(script["END"])[0]
    assert written(script) == block, "run: python tests/versions.py --page"


def test_an_environment_that_is_run_has_new_lines(script: dict[str, Any]) -> None:
    versions = {**script["PINS"], "Python": "3.11.7", "mlflow": "3.0.0"}
    versions = {name: versions[name] for name in ("Python", "torch", "ray", "mlflow", "pydantic")}
    one = script["Environment"](date="2030-01-01", versions=versions, tests={"contract": "1 failed"}, failed=("a::b",))
    new = set(written(script, lowest=one).splitlines()) - set(PAGE.splitlines())
    row = " | ".join(versions.values())
    assert new == {
        f"| `lowest` | {row} | 2030-01-01 | contract: 1 failed |",
        "### What failed",
        "- `lowest`: `a::b`",
    }


def test_an_environment_that_was_not_run_is_not_shown_as_passed(script: dict[str, Any]) -> None:
    one = script["Environment"](date="2026-11-24", not_run="no uv")
    row = next(line for line in written(script, lowest=one).splitlines() if line.startswith("| `lowest`"))
    assert row == "| `lowest` | | | | | | 2026-11-24 | not run: no uv |"
    assert "2026" not in script["read_lines"]("another", PAGE).row


def test_an_upper_end_of_a_range_has_its_reason_beside_it() -> None:
    lines = (TESTS.parent / "pyproject.toml").read_text().splitlines()
    assert [line for line in lines if re.search(r'"[\w\[\]-]+[=<>][^"]*<', line) and "#" not in line] == []


def test_a_python_that_is_missing_is_no_other_one(script: dict[str, Any]) -> None:
    assert script["interpreter"]("3.98") is None
