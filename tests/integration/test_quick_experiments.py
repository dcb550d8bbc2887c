"""``--quick`` of the experiments that come along, as a user starts it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["tabular", "nanogpt", "contrastive", "dcgan", "wordlm"])
def test_a_quick_run_ends_well(
    name: str, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("run", str(ROOT / "experiments" / f"{name}.yaml"), "--quick", "--json")
    assert ended.code == 0, ended.output
    rows = json.loads(ended.stdout)
    assert "validation/loss" in json.dumps(rows)
