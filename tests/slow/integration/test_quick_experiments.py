"""Each file of experiments/ passes ``check`` and trains with ``--quick`` as it is, as a user starts it."""

# promise: the experiments that come along; nanoGPT's losses are those of a loop in plain torch
# promise: each file of `experiments/` and each answer of the templates runs as it is

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.data import example_sentences

FILES = {path.stem: path for path in (Path(__file__).parents[3] / "experiments").glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"cifar10"}))
def test_it_runs_as_it_is(name: str, command: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(example_sentences.__kwdefaults__, "steps", 1)  # of 300, for finetune.yaml
    checked = command("check", str(FILES[name]))
    assert checked.code == 0, checked.output
    ended = command("run", str(FILES[name]), "--quick", "--json")
    assert ended.code == 0, ended.output
    facts = {fact["key"]: fact["value"] for fact in json.loads(ended.stdout)["facts"]}
    assert facts["estimated_training_s"] > facts["time_to_first_step_s"] > 0


def test_what_needs_gpus_says_so(command: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("torchvision")
    checked = command("check", "--no-data", str(FILES["cifar10"]))
    assert checked.code == 0, checked.output
    ended = command("run", str(FILES["cifar10"]), "--quick")
    assert ended.code == 3, ended.output
    assert "GPU" in ended.stderr
