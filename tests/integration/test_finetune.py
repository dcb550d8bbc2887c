"""experiments/finetune.yaml as a user runs it: its encoder is built, it works, its result is started from."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "experiments" / "finetune.yaml")
SHORT = ["--quick", "parallel.workers=1", "parallel.launcher=inprocess", "parallel.strategy=single"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder") / "tiny-encoder"
    script = ROOT / "experiments" / "tiny_encoder.py"
    subprocess.run([sys.executable, script, folder, "--steps", "1"], check=True, capture_output=True)
    return folder


def started(folder: Path) -> dict[str, Any]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    found: dict[str, Any] = next(event for event in events if event["kind"] == "started")
    return found


def test_it_works_and_its_result_can_be_started_from(
    command: Callable[..., Any], encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"model.path={encoder}"
    plan = command("run", FILE, path, "--dry-run")
    assert f"note: starts from {encoder}/model.safetensors\n" in plan.stdout
    assert "training     frozen parameters (bert.embeddings.position*, bert.embeddings.token_type*)\n" in plan.stdout
    assert "group        classifier.*, bert.pooler.* with lr 0.002\n" in plan.stdout

    ended = command("run", FILE, path, *SHORT)
    assert ended.code == 0, ended.output
    assert re.search(
        r"37 tensors loaded, bert\.pooler\.\S+, .* left as initialised, cls\.\S+ .* not used", ended.output
    )
    assert "pickle" not in ended.output
    (first,) = (tmp_path / "runs").iterdir()
    assert started(first)["frozen"] == 34 * 64  # positions and types

    again = command("run", FILE, path, *SHORT, f"train.start_from={{run: {first.name}}}")
    assert again.code == 0, again.output
    (second,) = (folder for folder in (tmp_path / "runs").iterdir() if folder != first)
    found = started(second)["loaded"]
    assert (found["left"], found["unused"]) == ([], [])
    assert found["source"].startswith(f"run {first.name}, the weights of step ")
    _check_model(tmp_path, second)
    (encoder / "model.safetensors").rename(encoder / "elsewhere.safetensors")  # a checkpoint has the weights
    evaluated = command("evaluate", first.name)
    assert evaluated.code == 0, evaluated.output
    exported = command("export", first.name, "--to", str(tmp_path / "out"), "--format", "torch-export")
    assert exported.code == 0, exported.output
    assert "model(input_ids=torch.zeros((2, " in (tmp_path / "out" / "load.py").read_text()
    called = subprocess.run([sys.executable, tmp_path / "out" / "load.py"], check=True, capture_output=True, text=True)
    assert "logits" in called.stdout
    (encoder / "elsewhere.safetensors").rename(encoder / "model.safetensors")


def _check_model(folder: Path, run: Path) -> None:
    """The model in MLflow takes sequences of any length, by name, and has what it started from as a tag."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'finetune-topics'")
    (tracked,) = client.search_runs([experiment.experiment_id], filter_string=f"tags.`pipeline.run` = '{run.name}'")
    assert tracked.data.tags["start_from"].startswith("starts from run ")
    model = client.get_logged_model(tracked.outputs.model_outputs[0].model_id)
    place = Path(model.artifact_location.removeprefix("file://"))
    signature = mlflow.models.Model.load(place / "MLmodel").signature
    assert signature.inputs.input_names() == ["input_ids", "attention_mask"]
    program = torch.export.load(place / "data" / "model.pt2").module()
    tokens = {name: torch.ones(5, 7, dtype=torch.int64) for name in signature.inputs.input_names()}
    assert program(**tokens)["logits"].shape == (5, 4)


def test_all_mistakes_are_told_with_their_lines(command: Callable[..., Any], encoder: Path, tmp_path: Path) -> None:
    text = (ROOT / "experiments" / "finetune.yaml").read_text().replace("strict: false", "strict: true")
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace("bert.embeddings.p", "bert.embedings.p").replace("classifier.*", "clasifier.*"))
    ended = command("check", str(file))
    assert "train.start_from.file: is tiny-encoder/model.safetensors; there is no such file" in ended.stderr

    ended = command("run", str(file), f"model.path={encoder}", "--dry-run")
    assert ended.code == 2
    for key in (
        "optimizer.groups[1].match: clasifier.*",
        "train.freeze[0]: bert.embedings.position*",
        "train.start_from: ",
    ):
        assert re.search(rf"wrong\.yaml:\d+: {re.escape(key)}", ended.stderr), ended.stderr
    assert "did you mean bert.embeddings" in ended.stderr
