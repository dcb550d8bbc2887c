"""How many lines each folder may have: no row is raised. A folder that shrinks lowers its row."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

SECOND_EDITION = {
    "experiment": 1_700,
    "plan": 450,
    "protocol": 950,
    "launch": 1_400,
    "worker": 330,
    "drive": 600,
    "record": 850,
    "tracking": 800,
    "system": 250,
    "train": 5_200,
    "strategies": 410,
    "tasks": 410,
    "data": 400,
    "models": 400,
    "results": 2_200,
    "commands": 2_600,
    "": 950,
}
"""Lines of each folder of ``pipeline/`` when the second edition is whole; "" is the modules beside the folders."""
LARGER_TODAY = {
    "": 1_116,
    "api": 490,
    "cli": 691,
    "commands": 4_580,
    "data": 998,
    "drive": 1_058,
    "experiment": 3_251,
    "launch": 1_814,
    "models": 408,
    "plan": 646,
    "protocol": 1_423,
    "record": 1_534,
    "results": 3_225,
    "strategies": 668,
    "tasks": 906,
    "tracking": 1_678,
    "train": 9_064,
}
"""Lines of folders that are larger, or that other folders replace. A row goes with its folder."""
FILES = 170  # Modules of ``pipeline/``; 170 when the second edition is whole
TEST_LINES = 43_647  # Lines of Python in ``tests/``; 22,000 when the second edition is whole


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_no_folder_outgrows_its_budget() -> None:
    modules: dict[str, list[Path]] = {}
    for path in (ROOT / "pipeline").rglob("*.py"):
        parts = path.relative_to(ROOT / "pipeline").parts
        modules.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    lines = {folder: lines_of(*paths) for folder, paths in modules.items()}
    budget = SECOND_EDITION | LARGER_TODAY
    assert {folder: (n, budget.get(folder)) for folder, n in lines.items() if n > budget.get(folder, 0)} == {}
    assert LARGER_TODAY.keys() <= lines.keys(), "a folder is gone: remove its row"
    assert sum(map(len, modules.values())) <= FILES


def test_the_tests_do_not_outgrow_their_budget() -> None:
    assert lines_of(*(ROOT / "tests").rglob("*.py")) <= TEST_LINES
