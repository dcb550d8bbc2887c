"""The YAML of docs/model-and-data.md, word for word, on files that have the names it gives."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.protocol.events import Finished, Started
from pipeline.record import journal

DOCS = (Path(__file__).parents[3] / "docs" / "model-and-data.md").read_text()
BLOCKS = {
    kind: block
    for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    for kind in re.findall(r"pipeline\.data\.(\w+)", block)[:1]
}
ROWS = {"train": 22, "validation": 9}


def columns(part: str) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(len(part)).normal(size=(ROWS[part], 4)).astype(np.float32)
    return inputs, np.arange(ROWS[part]) % 3


def arrays() -> None:
    for part in ROWS:
        for name, column in zip("xy", columns(part), strict=True):
            np.save(f"data/{part}-{name}.npy", column)


def tokens() -> None:
    for name, windows in (("train-0", 10), ("train-1", 12), ("validation", 9)):
        (np.arange(32 * windows + 1) % 50).astype(np.uint16).tofile(f"data/{name}.bin")


WRITES = {"arrays": arrays, "tokens": tokens, "balanced": arrays}


def experiment(kind: str) -> dict[str, Any]:
    """The block of the documentation, and all that it leaves out."""
    gpt = {"vocabulary_size": 50, "context_length": 32, "width": 4, "depth": 1, "heads": 1}
    model = (
        {"model": {"_target_": "pipeline.models.GPT", **gpt}, "task": {"_target_": "pipeline.tasks.LanguageModel"}}
        if kind == "tokens"
        else {
            "model": {"_target_": "pipeline.models.MLP", "in_features": 4, "hidden": [4], "num_classes": 3},
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        }
    )
    return {
        "name": kind,
        **model,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "train": {"epochs": 1, "global_batch_size": 4},
        **yaml.safe_load(BLOCKS["arrays"]),
        **yaml.safe_load(BLOCKS[kind]),
    }


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_there_trains(
    kind: str, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    WRITES[kind]()
    Path("experiment.yaml").write_text(yaml.safe_dump(experiment(kind)))
    ended = command("run", "experiment.yaml", "--no-baseline", "tracking.log_model=false")

    assert ended.code == 0, ended.output
    (folder,) = Path("runs").iterdir()
    events = list(journal.read(folder / journal.FILE_NAME))
    (begun,) = (event for event in events if isinstance(event, Started))
    assert {"train": begun.train_samples, "validation": begun.validation_samples} == ROWS
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert finished.result.steps == 6
    assert "validation/loss" in finished.result.metrics


def test_every_block_of_yaml_is_tested() -> None:
    assert BLOCKS.keys() == WRITES.keys()
    assert DOCS.count("_target_: pipeline.data.") == len(BLOCKS)
