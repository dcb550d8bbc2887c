"""experiments/finetune.yaml: its encoder is made once, it starts from a file and from the result of a run."""

# promise: fine-tuning through the command, its model in MLflow; LoRA by peft

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import code
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.data import example_sentences

ROOT = Path(__file__).parents[3]
FILE = str(ROOT / "experiments" / "finetune.yaml")
ALONE = ["parallel.workers=1", "parallel.launcher=inprocess", "parallel.strategy=single"]
SHORT = ["--train-only", "train.epochs=1", *ALONE]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return Path(example_sentences(str(tmp_path_factory.mktemp("encoder") / "tiny-encoder"), steps=1)).parent


def test_any_rank_makes_the_whole_encoder(tmp_path: Path) -> None:
    """As transformers' ``save_pretrained`` writes nothing on the ranks after the first one."""
    pytest.importorskip("transformers")
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        example_sentences(str(tmp_path / "tiny-encoder"), steps=1)
    finally:
        dist.destroy_process_group()
    made = {path.name for path in (tmp_path / "tiny-encoder").iterdir()}
    assert {"config.json", "model.safetensors", "sentences.csv", "tokenizer.json"} <= made


def from_file(encoder: Path) -> list[str]:
    """Overrides by which the weights come from a file, which the run reports."""
    start = f"train.start_from={{file: {encoder}/model.safetensors, strict: false}}"
    return [f"model.path={encoder}", "model.weights=false", f"data.source={encoder}/sentences.csv", start]


def test_ranks_that_need_it_at_once_make_it_once(tmp_path: Path) -> None:
    code = "import sys; from pipeline.data import example_sentences; example_sentences(sys.argv[1], steps=1)"
    line = [sys.executable, "-c", code, "made/encoder"]
    both = [subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert "".join(said).count("made/encoder does not exist. Making example sentences and an encoder") == 1
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["encoder"]


def started(folder: Path) -> dict[str, Any]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    found: dict[str, Any] = next(event for event in events if event["kind"] == "started")
    return found


def test_it_works_and_its_result_can_be_started_from(
    command: Callable[..., Any], encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = from_file(encoder)
    plan = command("run", FILE, *path, "--dry-run")
    assert f"starts from {encoder}/model.safetensors" in plan.stdout
    assert "frozen parameters (bert.embeddings.position*, bert.embeddings.token_type*)\n" in plan.stdout
    assert "group classifier.*, bert.pooler.* with lr 0.002\n" in plan.stdout

    ended = command("run", FILE, *path, *SHORT)
    assert ended.code == 0, ended.output
    assert re.search(
        r"37 tensors loaded, bert\.pooler\.\S+, .* left as initialised, cls\.\S+ .* not used", ended.output
    )
    assert "pickle" not in ended.output
    (first,) = (tmp_path / "runs").iterdir()
    assert started(first)["frozen"] == 34 * 64  # positions and types

    again = command("run", FILE, *path, *SHORT, f"train.start_from={{run: {first.name}}}")
    assert again.code == 0, again.output
    (second,) = (folder for folder in (tmp_path / "runs").iterdir() if folder != first)
    found = started(second)["loaded"]
    assert (found["left"], found["unused"]) == ([], [])
    assert found["source"].startswith(f"run {first.name}, the weights of step ")
    _check_model(tmp_path, second)
    (encoder / "model.safetensors").rename(encoder / "elsewhere.safetensors")  # a checkpoint has the weights
    evaluated = command("evaluate", first.name)
    assert evaluated.code == 0, evaluated.output
    exported = command("export", first.name, "--to", str(tmp_path / "out"))
    assert exported.code == 0, exported.output
    (program, _) = code((tmp_path / "out" / "README.md").read_text())
    assert "program(input_ids=torch.zeros((2, " in program
    line = [sys.executable, "-c", f"{program}\nprint(outputs)"]
    called = subprocess.run(line, cwd=tmp_path / "out", check=True, capture_output=True, text=True)
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
    assert program(*tokens.values())["logits"].shape == (5, 4)


def test_all_mistakes_are_told_with_their_lines(command: Callable[..., Any], encoder: Path, tmp_path: Path) -> None:
    text = (ROOT / "experiments" / "finetune.yaml").read_text()
    file = tmp_path / "wrong.yaml"
    start = f"train:\n  start_from: {{file: {encoder}/model.safetensors}}"
    text = text.replace("bert.embeddings.p", "bert.embedings.p").replace("classifier.*", "clasifier.*")
    file.write_text(text.replace("train:", start))

    ended = command("run", str(file), *from_file(encoder)[:-1], "--dry-run")
    assert ended.code == 2
    for key in (
        "optimizer.groups[1].match: clasifier.*",
        "train.freeze[0]: bert.embedings.position*",
        "train.start_from: ",
    ):
        assert re.search(rf"wrong\.yaml:\d+: {re.escape(key)}", ended.stderr), ended.stderr
    assert "did you mean bert.embeddings" in ended.stderr
