"""Page on a GPU: the tables of docs/status.md, with and without results; what the bundle holds."""

# promise: what a GPU proves, and a table that says what has not run

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_page")


def test_the_page_has_what_was_found_and_the_readme_says_what_was_not(gpu_page: Any) -> None:
    result = json.loads(gpu_page.RESULT.read_text()) if gpu_page.RESULT.is_file() else None
    page = gpu_page.PAGE.read_text()
    assert page.partition(gpu_page.BEGIN)[2].partition(gpu_page.END)[0] == gpu_page.table(result)
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:10])
    assert ("Nobody has run this on a GPU yet" in page) == ("Not yet run on a GPU" in head) == (result is None)


def test_every_test_of_a_gpu_has_its_claim(gpu_page: Any) -> None:
    source = "".join(path.read_text() for path in (ROOT / "tests" / "slow" / "gpu").glob("test_*.py"))
    assert set(re.findall(r"(?m)^def (test_\w+)", source)) == set(gpu_page.TESTS)


def test_a_result_becomes_rows(gpu_page: Any) -> None:
    def figures(who: str, speeds: list[float], **more: Any) -> dict[str, Any]:
        shared = {"case": "GPT-2 small", "compiled": True, "mfu": 0.4, "peak_memory_mb": 9000.0, "utilization": None}
        return {**shared, "who": who, "samples_per_second": speeds, "data_wait_share": None, **more}

    own = figures("pipeline", [99, 100, 101, 198, 202, 204], data_wait_share=0.002, utilization=98.0)
    training = figures("training", [90, 90, 90, 180, 180, 180])
    result = {
        "device": "A", "torch": "2", "remarks": ["B."], "date": "2026-01-01", "tiny": False,
        "figures": [figures("bare", [100, 100, 100, 200, 200, 200]), own, training],
        "tests": {
            "test_ranks_over_nccl_train_as_one_process[1-ddp]": "passed",
            "test_ranks_over_nccl_train_as_one_process[2-ddp]": "skipped: one GPU",
            "test_peak_memory_is_that_of_torch": "failed: 1 | 2",
            "test_an_error_ends_a_process_of_its_own": "passed",
        },
    }  # fmt: skip
    table = gpu_page.table(result)
    assert table.startswith("A, torch 2, 2026-01-01. B.\n\n| training |")
    for row in (
        "bf16, compiled | 1.005x (1.000 to 1.010 in 2 rounds); "
        "a training with its reports 0.900x (0.900 to 0.900 in 2 rounds) | "
        "40.0% (script 40.0%), utilization 98% | 0.2% of a step | 9,000 MiB (script 9,000 MiB) |",
        "| GPT of 124 million parameters, bf16 | not run | not run | not run | not run |",
        "in fp64 | passed, skipped: one GPU |",
        "own figure | failed: 1 / 2 |",
        "| utilization and energy are read | not run |",
        f"1 of {len(gpu_page.TESTS)} claims of the GPU tests passed in every case. The others:\n\n| claim",
    ):
        assert row in table
    assert gpu_page.TESTS["test_an_error_ends_a_process_of_its_own"] not in table


def test_the_kit_leaves_out_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kit = importlib.import_module("gpu_bundle")
    names = kit.closure(kit.NEEDED, python="3.12")
    assert {"pydantic-core", "lightning-utilities", "antlr4-python3-runtime", "pluggy"} <= set(names)
    assert not {"torch", "ray", "mlflow", "pandas", "scipy", "scikit-learn", "matplotlib"} & set(names)
    assert all((ROOT / name).exists() for name in (*kit.PROJECT, *kit.SOURCES))
