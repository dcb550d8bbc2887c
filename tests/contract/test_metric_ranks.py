"""Metrics among several ranks: each sample counts once, however few there are; what one batch shows is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import toys
from ranks import on_ranks

from pipeline.errors import PipelineError
from pipeline.protocol.trial import Rank
from pipeline.training.build import build
from pipeline.training.evaluation import evaluate, prepare

OF = "torchmetrics.classification."
CLASSES = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
METRICS = {
    "auroc": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    "same": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    "ap": {"_target_": f"{OF}MulticlassAveragePrecision", "num_classes": 3, "average": "none"},
    "accuracy": {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 3},
    "samples": {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 3, "average": "micro"},
    "confusion": {"_target_": f"{OF}MulticlassConfusionMatrix", "num_classes": 3},
    "worst": {
        "_target_": "torchmetrics.MinMaxMetric",
        "base_metric": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    },
    "parts": {"_target_": "toy_metrics.Parts"},
    "each": {"_target_": "toy_metrics.Each"},
    "stacked": {"_target_": "toy_metrics.Moving"},
    "averaged": {"_target_": "toy_metrics.Moving", "reduction": "mean"},
}
"""List states that are concatenated, list states that aren't, both kinds in one, tensors, and metrics in a metric.

Numbers for each sample, tensors without an exact reduction, and a tensor whose type the first batch changes."""
SAMPLES = (2, 5, 11)
"""Fewer than ranks; one or two samples on each; several batches, and a last one that not all ranks have."""


def _evaluate(rank: Rank, folder: Path) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for samples in SAMPLES:
        trial = toys.trial(
            **CLASSES, data={"_target_": "toys.classification", "validation": samples}, metrics=METRICS,
            train={"global_batch_size": 3 if rank.world_size == 1 else 6},
        ).model_copy(update={"workers": rank.world_size})  # fmt: skip
        context = build(trial, rank=rank)
        prepare(context)
        found[str(samples)] = [evaluate(context) for _ in range(2)]
    (folder / f"{rank.world_size}-{rank.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process found, then each of three."""
    folder = tmp_path_factory.mktemp("metrics")
    _evaluate(Rank(), folder)
    on_ranks(_evaluate, folder, folder=folder, world_size=3)
    return [json.loads((folder / name).read_text()) for name in ("1-0.json", "3-0.json", "3-1.json", "3-2.json")]


@pytest.mark.parametrize("samples", SAMPLES)
def test_all_ranks_find_what_one_process_does(evaluations: list[dict[str, Any]], samples: int) -> None:
    alone, *ranks = (found[str(samples)] for found in evaluations)
    assert "validation/parts" in alone[0]
    for found in ranks:
        for values, again in zip(found, alone, strict=True):
            assert values == pytest.approx(again, rel=1e-6, nan_ok=True)


def _train(rank: Rank, folder: Path) -> None:
    """A validation sample that is NaN is on rank 1 alone; then metrics that don't fit."""
    told = []
    cases: list[dict[str, Any]] = [
        {"data": {"_target_": "toys.poisoned_validation"}, "checkpoint": {"every_steps": 2}},
        {"metrics": {"roc": {"_target_": "toy_metrics.Texts"}}},
        {"metrics": {"count": {"_target_": "toy_metrics.Outside"}}},
        {"metrics": {"count": {"_target_": "toy_metrics.Listed"}}},
    ]
    for number, sections in enumerate(cases):
        trial = toys.trial(**sections).model_copy(
            update={"workers": 2, "strategy": "ddp", "checkpoints": str(folder / f"checkpoints-{number}")}
        )
        try:
            toys.train(trial, rank=rank, outbox=toys.Kept())
        except PipelineError as error:
            told.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank.rank}.json").write_text(json.dumps(told))


def test_all_ranks_stop_alike(tmp_path: Path) -> None:
    on_ranks(_train, tmp_path, folder=tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    nan, texts, outside, listed = first
    assert "metrics.count: Outside updates rows, which is not merged over workers. Declare it with" in outside
    assert "metrics.count: Listed has metrics in the list or dict inner. Put them into torch.nn.ModuleList" in listed
    assert nan.startswith("TrainingError: the validation loss is nan after epoch 1 (step 3), although")
    assert texts.startswith("ExperimentError: metrics.roc: Texts returned a str. Use a metric that returns a number")
    assert [folder.name for folder in (tmp_path / "checkpoints-0").iterdir()] == ["step-00000002"]
