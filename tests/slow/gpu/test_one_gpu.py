"""Failures that one CUDA GPU is enough to show, each of which an H100 has shown or ruled out.

Needs neither Ray, MLflow nor scikit-learn, so that the folder of `make gpu-bundle` runs it, with `--noconftest`.
"""

# promise: what a GPU proves, and a table that says what has not run

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_trials import GPUS, NEEDS_CUDA, NEEDS_GPU, launch, result_of, series, trained_weights, trial
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pipeline.models import resnet18
from pipeline.plan import resources
from pipeline.protocol.events import EXAMPLE, WEIGHTS
from pipeline.record import journal
from pipeline.tasks import Loss

pytestmark = NEEDS_GPU
RESNET: dict[str, Any] = {
    "model": {"_target_": "pipeline.models.resnet18", "num_classes": 10, "width": 8},
    "data": {"_target_": "test_one_gpu.images"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
BATCHES: dict[str, Any] = {"global_batch_size": 32, "precision": "fp32"}  # Four batches of the images in an epoch
FP32: dict[str, Any] = {"precision": "fp32"}


class Tf32(nn.Linear):
    """Sets TF32 by the API of torch 2.9 and later in its constructor."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        torch.backends.cuda.matmul.fp32_precision = "tf32"


class Large(nn.Module):
    """Weights of so many MB."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3, megabytes * 2**18 // 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weights[:, :1]


class Means(nn.Module):
    """A parameter times the mean of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs.mean(1, keepdim=True)


class Graph:
    """A batch that only knows how to move itself, as those of PyTorch Geometric."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.inputs.to(device), self.targets.to(device))


def graphs() -> Callable[[list[tuple[Tensor, Tensor]]], Graph]:
    """A collate function."""
    return lambda samples: Graph(*(torch.stack(values) for values in zip(*samples, strict=True)))


class GraphTask(nn.Module):
    """The mean squared error of a `Graph`."""

    def forward(self, model: nn.Module, batch: Graph) -> Loss:
        outputs = model(batch.inputs)
        squares = nn.functional.mse_loss(outputs, batch.targets, reduction="sum")
        return Loss(squares, torch.tensor(outputs.numel()), outputs, batch.targets)


def images() -> tuple[Dataset[Any], Dataset[Any]]:
    """Noise (128, 3, 16, 16), a tenth brighter for each class."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (128,), generator=generator)
    noise = torch.randn(128, 3, 16, 16, generator=generator)
    data = TensorDataset(noise + labels[:, None, None, None] / 10, labels)
    return data, data


def large_batches() -> tuple[Dataset[Any], Dataset[Any]]:
    """Samples of 4 MB, 32 MB in a batch of 8."""
    inputs = torch.randn(16, 2**20)
    data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
    return data, data


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_resumed_training_has_the_weights_of_a_whole_one(tmp_path: Path, optimizer: str, memory_format: str) -> None:
    how = {"_target_": f"torch.optim.{optimizer}", "lr": 0.003, **({"momentum": 0.9} if optimizer == "SGD" else {})}

    def run(name: str, *, epochs: int, resume: bool = False) -> dict[str, Tensor]:
        (checkpoints := tmp_path / name).mkdir(exist_ok=True)
        made = trial(**RESNET, optimizer=how, train={**BATCHES, "epochs": epochs, "memory_format": memory_format})
        return trained_weights(made.model_copy(update={"checkpoints": str(checkpoints), "resume": resume}), tmp_path)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = run("whole", epochs=2)
        run("cut", epochs=1)
        resumed = run("cut", epochs=2, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6)


def test_the_exported_program_computes_what_was_trained(tmp_path: Path) -> None:
    """On the CPU, from the example that the training has kept."""
    pytest.importorskip("mlflow", reason="MLflow writes the program")
    made = trial(**RESNET, train={**BATCHES, "epochs": 1}).model_copy(update={"exports": True})
    outcome, folder = launch(made, tmp_path)
    result_of(outcome)
    example = torch.load(folder / EXAMPLE, weights_only=True)
    assert example.device.type == "cpu"
    model = resnet18(num_classes=10, width=8).eval()
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True))
    (program,) = folder.glob("model/mlflow/data/*.pt2")
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(program).module()(example), model(example))


@NEEDS_CUDA
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_cuda_graphs_train_and_evaluate_as_eager_code(tmp_path: Path, strategy: str) -> None:
    """The metric keeps the outputs of all batches, which a replayed graph would overwrite."""
    metrics = {"auroc": {"_target_": "torchmetrics.classification.MulticlassAUROC", "num_classes": 10}}
    found = []
    for how in ({}, {"compile": {"mode": "reduce-overhead"}}):
        made = trial(**RESNET, metrics=metrics, train={**BATCHES, "epochs": 3, **how})
        outcome, folder = launch(made.model_copy(update={"strategy": strategy}), tmp_path)
        found.append((list(result_of(outcome).losses), series(folder, "validation/auroc")[-1]))
    (losses, auroc), (graphed_losses, graphed_auroc) = found
    assert graphed_losses == pytest.approx(losses, rel=0.05)
    assert graphed_auroc == pytest.approx(auroc, abs=0.05)


@NEEDS_CUDA
def test_tf32_by_the_newer_api_trains(tmp_path: Path) -> None:
    model = {"_target_": "test_one_gpu.Tf32", "in_features": 3, "out_features": 1}
    assert result_of(launch(trial(model=model, train=FP32), tmp_path)[0]).matmul_precision == "high"


def test_batches_that_move_themselves_reach_the_gpu(tmp_path: Path) -> None:
    loader = {"collate": {"_target_": "test_one_gpu.graphs"}}
    result_of(
        launch(trial(task={"_target_": "test_one_gpu.GraphTask"}, loss=None, loader=loader, train=FP32), tmp_path)[0]
    )


@NEEDS_CUDA
def test_the_peak_memory_is_not_from_the_training_before(tmp_path: Path) -> None:
    large = trial(model={"_target_": "test_one_gpu.Large", "megabytes": 400}, train=FP32)
    (before,) = result_of(launch(large, tmp_path)[0]).peak_memory_mb
    (after,) = result_of(launch(trial(train=FP32), tmp_path)[0]).peak_memory_mb
    assert after < before / 10


@NEEDS_CUDA
def test_epochs_do_not_pile_up_cached_memory(tmp_path: Path) -> None:
    sections = {"data": {"_target_": "test_one_gpu.large_batches"}, "model": {"_target_": "test_one_gpu.Means"}}
    reserved = []
    for epochs in (2, 30):
        result_of(launch(trial(**sections, train={**FP32, "epochs": epochs}), tmp_path)[0])
        reserved.append(torch.cuda.memory_reserved())
        gc.collect()
    assert reserved[1] < 1.5 * reserved[0]


@NEEDS_CUDA
def test_planning_counts_the_gpus_that_torch_sees() -> None:
    assert resources.detect().gpus == tuple(torch.cuda.get_device_name(index) for index in range(GPUS))


@NEEDS_CUDA
def test_system_metrics_have_the_gpu(tmp_path: Path) -> None:
    outcome, folder = launch(trial(train={**FP32, "epochs": 50}), tmp_path)
    result_of(outcome)
    assert "system/gpu_0_power_usage_watts" in (folder / journal.FILE_NAME).read_text()
