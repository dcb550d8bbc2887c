"""Memory over an epoch of data ten times larger than what the process may still use."""

# promise: data larger than memory: memory stays flat over an epoch; what the allocator keeps

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "flat_memory.py"
LIMIT_MB, DATA_MB = 25, 250
CHILD = """
import json, sys
from pathlib import Path
import flat_memory, torch
torch.set_num_threads(1)
flat_memory.limit_memory(flat_memory.memory()["data"] + float(sys.argv[2]))
for kind in flat_memory.KINDS:
    try:
        print(json.dumps([kind, flat_memory.read_epoch(kind, Path(sys.argv[1]))]))
    except MemoryError as error:
        print(json.dumps([kind, str(error)]))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each kind of data in one process that is limited."""
    benchmark = _benchmark()
    folder = tmp_path_factory.mktemp("data")
    for kind in benchmark.KINDS:
        benchmark.make(kind, folder, data_mb=DATA_MB)
    line = [sys.executable, "-c", CHILD, str(folder), str(LIMIT_MB)]
    done = subprocess.run(line, cwd=BENCHMARK.parent, capture_output=True, text=True, timeout=200, check=False)
    for file in folder.iterdir():
        file.unlink()
    assert not done.returncode, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flat_memory", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["arrays", "tokens"])
def test_memory_stays_flat_over_an_epoch(read: dict[str, Any], kind: str) -> None:
    readings = read[kind]["readings"]

    assert readings[-1]["read"] == pytest.approx(DATA_MB, abs=1)
    assert max(reading["own"] for reading in readings) - readings[0]["own"] < LIMIT_MB / 2


def test_the_limit_is_one(read: dict[str, Any]) -> None:
    assert "Unable to allocate" in read["loaded"]
