"""The experiments of the repository: nanogpt.yaml trains what its loop in plain torch does, table and quick runs."""

# promise: the experiments that come along; nanoGPT's losses are those of a loop in plain torch

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys

from pipeline.data import tabular
from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.trial import Baseline, Rank, Training
from pipeline.train import run

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "examples" / "nanogpt" / "plain.py"
ALONE: dict[str, Any] = {
    "name": "main", "strategy": "single", "launcher": "inprocess", "workers": 1, "devices_per_worker": 0,
    "device": "cpu", "cpus_per_worker": 1, "allowed": BUILT_IN,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Any:
    """The module examples/nanogpt/plain.py."""
    module = ModuleType("plain")
    exec(compile(PLAIN.read_text(), PLAIN, "exec"), module.__dict__)
    return module


def test_nanogpt_has_the_losses_of_its_loop_in_plain_torch(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "add_measurements", lambda _, result, **__: result)
    small = ["model.width=8", "model.depth=1", "train.precision=fp64", "train.log_every_steps=1"]
    experiment = load(ROOT / "experiments" / "nanogpt.yaml", small).experiment
    trial = Baseline(**ALONE, experiment=experiment, max_steps=4)
    kept = toys.Kept()
    run.train(trial, rank=Rank(), outbox=kept)

    losses = plain.train(4, width=8, depth=1, dtype=torch.float64)
    assert kept.series("train/loss") == pytest.approx(losses, rel=1e-12)
    assert losses[-1] < losses[0]
    assert (
        experiment.train.steps, experiment.train.global_batch_size, experiment.train.gradient_accumulation
    ) == (plain.STEPS, plain.BATCH, plain.PARTS)  # fmt: skip


def test_tabular_tries_itself_with_a_test_set() -> None:
    experiment = load(ROOT / "experiments" / "tabular.yaml", ["tracking.log_model=false"]).experiment
    trial = Training(**ALONE, experiment=experiment, is_quick=True, train_only=True)
    kept = toys.Kept()
    assert run.train(trial, rank=Rank(), outbox=kept).steps == trial.quick_steps
    names = [f"test/confusion_true_{true}_predicted_{predicted}" for true in range(2) for predicted in range(2)]
    table = [kept.series(name)[0] for name in names]
    assert (sum(table[:2]), sum(table[2:])) == (42, 71)
    assert kept.series("test/recall_0") == [pytest.approx(table[0] / 42)]


@pytest.mark.parametrize(
    ("name", "features", "sizes"),
    [
        ("breast_cancer", 30, ([128, 214], [42, 72], [42, 71])),
        ("wine", 13, ([35, 43, 28], [12, 14, 10], [12, 14, 10])),
        ("iris", 4, ([30] * 3, [10] * 3, [10] * 3)),
    ],
)
def test_a_table_has_three_parts_of_all_classes(name: str, features: int, sizes: tuple[list[int], ...]) -> None:
    parts: Any = tabular(table=name)
    assert [part.tensors[1].bincount().tolist() for part in parts] == list(sizes)
    inputs = parts.train.tensors[0]
    assert (inputs.shape[1], inputs.dtype) == (features, torch.float32)
    assert inputs.mean(0).abs().max() < 1e-5
    assert (inputs.std(0) - 1).abs().max() < 1e-4
    rows = torch.cat([part.tensors[0] for part in parts])
    assert len(rows.unique(dim=0)) >= len(rows) - 3  # iris has three rows twice


def test_a_table_may_have_fewer_parts() -> None:
    assert tabular(table="iris", validation_fraction=0.5, test_fraction=0).test is None
    assert tabular(table="iris", validation_fraction=0).validation is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "titanic"}, r"data\.table: is 'titanic'; write one of breast_cancer, wine, iris"),
        ({"test_fraction": 1.0}, r"data\.test_fraction: is 1\.0; write a number from 0 \(none\) to less than 1"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4},
         r"data\.test_fraction: is 0\.6, and data\.validation_fraction is 0"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        tabular(**arguments)
