"""What commands and the driver import: a file that is wrong is refused before torch is there, which takes seconds."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIGHT = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for folder in ("drive", "commands", "cli")
    for path in sorted((REPOSITORY / "pipeline" / folder).rglob("*.py"))
    if path.stem != "__init__"
]


def file_of(module: str) -> Path | None:
    place = REPOSITORY / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))


@cache
def imports(module: str) -> set[str]:
    path = file_of(module)
    found = {module.rpartition(".")[0]} - {""}
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body) if path else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if not name.startswith("pipeline") or file_of(name)}


def way_to(target: str, module: str) -> list[str]:
    """The shortest chain of imports from a module; empty if there is none."""
    ways = [[module]]
    seen = {module}
    for way in ways:
        for name in sorted(imports(way[-1]) - seen):
            if name.partition(".")[0] == target:
                return [*way, name]
            seen.add(name)
            ways.append([*way, name])
    return []


@pytest.mark.parametrize("module", LIGHT)
def test_no_torch_is_imported(module: str) -> None:
    assert way_to("torch", module) == []


def test_a_worker_does() -> None:
    assert way_to("torch", "pipeline.worker") == ["pipeline.worker", "torch"]
