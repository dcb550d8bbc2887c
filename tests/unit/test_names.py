"""The field's words, one thing one name: names that needed their docstring to be understood don't come back."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = sorted((REPOSITORY / "pipeline").rglob("*.py"))

MODULES = {
    "blame", "meeting", "heap", "advance", "announce", "standstill", "rehearsal", "together", "keeper", "saver",
    "besides", "phrases", "members", "drawing", "earlier", "story", "joined", "room", "places", "look", "agreement",
    "changed", "setup",
}  # fmt: skip
"""Files that had other names than what the field calls their contents."""
DEFINITIONS = {
    "Vigil", "Watch", "Keeper", "Saver", "Written", "Advance", "Draw", "Setup", "Order", "Said", "Wanted", "poisoned",
    "standstill", "drain", "go_on", "consensus", "remember", "look", "room",
}  # fmt: skip
"""Classes and functions alike."""
PARALLEL = {
    "__init__",
    "base",
    "checks",
    "errors",
    "evaluate",
    "measure",
    "report",
    "run",
    "schema",
    "sweep",
    "weights",
}
"""Files that play the same role in folders beside each other, as commands.evaluate and train.evaluate do."""


def definitions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_file_and_what_it_defines_have_the_fields_names(path: Path) -> None:
    assert path.stem not in MODULES
    assert not DEFINITIONS & set(definitions(path))


def test_a_file_name_leads_to_one_file() -> None:
    names = Counter(path.stem for path in FILES if path.stem not in PARALLEL)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_private_part_of_ray_is_used() -> None:
    private = re.compile(r"\bray\._|\bray\.train\.\S*\._")
    users = {str(path.relative_to(REPOSITORY)) for path in FILES if private.search(path.read_text(encoding="utf-8"))}
    assert users == set()
