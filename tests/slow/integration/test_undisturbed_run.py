"""A whole run imports what is large without collecting garbage meanwhile."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def test_the_large_imports_of_a_run_are_made_without_it(tmp_path: Path) -> None:
    watched = """
import gc, json, sys
enabled = {}
class Watch:
    def find_spec(self, name, *_):
        if name in ("torch", "torch._dynamo"):
            enabled.setdefault(name, gc.isenabled())
sys.meta_path.insert(0, Watch())
from pipeline.cli import main
try:
    main()
finally:
    print(json.dumps(enabled))
"""
    mlp = Path(__file__).parents[3] / "experiments" / "mlp.yaml"
    asked = ["parallel.launcher=inprocess", "parallel.strategy=single", "parallel.workers=1", "train.epochs=1"]
    command = [sys.executable, "-c", watched, "run", str(mlp), *asked, "metrics={}", "--no-baseline", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"torch": False, "torch._dynamo": False}
