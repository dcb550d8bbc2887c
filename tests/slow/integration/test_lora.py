"""LoRA by peft, a ``_target_`` like any other: what is trained, at 1 and 2 workers, resumed, saved as an adapter."""

# promise: fine-tuning through the command, its model in MLflow; LoRA by peft

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toys
from blocks import code
from ranks import Ranks

from pipeline import Trained
from pipeline.data import example_sentences
from pipeline.experiment import components
from pipeline.models import pretrained
from pipeline.protocol.trial import Rank

pytest.importorskip("peft")
pytest.importorskip("transformers")
import torch

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # peft reads what transformers has deprecated

TRAINED = ("lora_A.default", "lora_B.default", "modules_to_save.default")


def lora(encoder: str) -> dict[str, Any]:
    """Sections of an experiment."""
    adapter = {
        "_target_": "peft.LoraConfig", "task_type": "SEQ_CLS", "r": 4, "target_modules": ["query", "value"],
        "modules_to_save": ["pooler"],  # drawn at random like the classifier, so an adapter without it would be lost
    }  # fmt: skip
    model = {
        "_target_": "pipeline.models.pretrained", "path": encoder, "task": "sequence-classification", "num_labels": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return {
        "model": {"_target_": "peft.get_peft_model", "model": model, "peft_config": adapter},
        "data": {
            "_target_": "pipeline.data.texts", "source": f"{encoder}/sentences.csv", "tokenizer": encoder,
            "max_length": 16, "validation_fraction": 0.2,
        },
        "loader": {"collate": {"_target_": "pipeline.data.padding.padded", "tokenizer": encoder}},
        "loss": None,
        "task": {"_target_": "pipeline.tasks.FromModel"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
        "train": {"epochs": None, "steps": 6, "global_batch_size": 16},
        "checkpoint": {"keep": 100, "every_steps": 3},
    }  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("encoder") / "tiny-encoder")
    example_sentences(folder, steps=1)
    return folder


def result(rank: Rank, encoder: str, folder: Path, *, resume: bool = False) -> tuple[dict[str, float], toys.Kept]:
    how = {
        "strategy": "ddp" if rank.world_size > 1 else "single", "workers": rank.world_size,
        "checkpoints": str(folder), "resume": resume, "allowed": (*toys.ALLOWED, "peft"),
    }  # fmt: skip
    done, kept = toys.trained(rank=rank, **how, **lora(encoder))
    return dict(done.metrics), kept


def _as_one(rank: Rank, encoder: str, root: Path, metrics: dict[str, float], weights: Path) -> None:
    for folder, resume in (("two", False), ("resumed", True)):
        found, kept = result(rank, encoder, root / folder, resume=resume)
        assert found["validation/loss"] == pytest.approx(metrics["validation/loss"], abs=1e-12), folder
        if rank.is_first:
            expected = torch.load(weights)
            trained = kept.files["model/weights.pt"]
            torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)
            frozen = [name for name in expected if not any(part in name for part in TRAINED)]
            assert all(torch.equal(trained[name], expected[name]) for name in frozen)


def test_two_workers_train_the_adapter_as_one_does_and_resume(encoder: str, tmp_path: Path) -> None:
    metrics, kept = result(Rank(), encoder, tmp_path / "one")
    trained = kept.files["model/weights.pt"]
    sections = lora(encoder)
    with torch.random.fork_rng(devices=()):
        model = components.build(toys.experiment(**sections).model, key="model", allowed=(*toys.BUILT_IN, "peft"))
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    base = {name: value.double() for name, value in model.state_dict().items() if "original_module" not in name}
    assert {part for part in TRAINED if any(part in name for name in learning)} == set(TRAINED)
    for name, value in base.items():
        if name in learning:
            assert "lora_A" in name or not torch.equal(trained[name], value), name
        elif name.startswith("base_model.model.bert.") and "pooler" not in name:  # the others are drawn at random
            assert torch.equal(trained[name], value), name
    started = next(event for event in kept.events if event.kind == "started")
    assert started.parameters == sum(model.get_parameter(name).numel() for name in learning)
    torch.save(trained, tmp_path / "weights.pt")
    shutil.copytree(tmp_path / "one" / "step-00000003", tmp_path / "resumed" / "step-00000003")
    with Ranks(2, timeout_s=300) as ranks:
        ranks.call(_as_one, encoder, tmp_path, metrics, tmp_path / "weights.pt")


def test_its_result_is_saved_as_an_adapter(
    command: Callable[..., Any], encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from safetensors import safe_open

    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text('[tool.pipeline]\npackages = ["peft"]\n')
    fast = {
        "parallel": {"strategy": "single", "launcher": "inprocess", "workers": 1},
        "tracking": {"uri": "sqlite:///mlflow.db"},
    }
    whole = {"name": "lora", "seed": 1, **lora(encoder), **fast}
    Path("lora.yaml").write_text(json.dumps({name: section for name, section in whole.items() if section is not None}))
    plan = command("run", "lora.yaml", "--dry-run")
    assert plan.code == 0, plan.output
    ended = command("run", "lora.yaml", "--train-only")
    assert ended.code == 0, ended.output
    model = Trained.load().model
    model.save_pretrained("adapter")  # type: ignore[operator]
    with safe_open("adapter/adapter_model.safetensors", "pt") as file:
        assert all(any(part in name for part in ("lora_", "classifier", "pooler")) for name in file.keys())  # noqa: SIM118
    again = PeftModel.from_pretrained(
        pretrained(encoder, task="sequence-classification", num_labels=4), "adapter"
    ).eval()
    inputs = {"input_ids": torch.tensor([[2, 9, 8, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model.get_base_model()(**inputs).logits)  # type: ignore[operator]
    exported = command("export", "latest", "--to", "out")
    assert exported.code == 0, exported.output
    (*_, weights) = code(Path("out/README.md").read_text())
    line = [sys.executable, "-c", weights]
    called = subprocess.run(line, cwd="out", capture_output=True, text=True, check=False)
    assert called.returncode == 0, called.stderr
