"""Paths that need a CUDA GPU: NCCL, memory that runs out, fp16, offload, NVML. Every test is skipped without one.

Needs neither Ray, MLflow nor scikit-learn, so that the folder of `make gpu-bundle` runs it, with `--noconftest`.
"""

# promise: what a GPU proves, and a table that says what has not run

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_trials import NEEDS_CUDA, NEEDS_GPU, RANKS, launch, on_ranks, result_of, series, trained_weights, trial
from torch import Tensor, nn

from pipeline.errors import NoMemoryError
from pipeline.protocol.events import WEIGHTS

pytestmark = NEEDS_GPU
GPT: dict[str, Any] = {
    "model": {
        "_target_": "pipeline.models.GPT", "vocabulary_size": 128, "context_length": 64, "width": 64, "depth": 2,
        "heads": 4,
    },
    "data": {"_target_": "pipeline.data.characters", "context_length": 64, "max_characters": 40_000},
    "loss": None,
    "task": {"_target_": "pipeline.tasks.LanguageModel"},
}  # fmt: skip
STEPS = {"epochs": None, "steps": 6, "global_batch_size": 32}


class Steep(nn.Module):
    """A loss whose gradients overflow in fp16 until the scale is some thousand times smaller than torch's first."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 1000 * nn.functional.mse_loss(outputs, targets)


class Hungry(nn.Module):
    """Keeps 128 MB for each sample until its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.layer(inputs).expand(-1, 2**22)
        for _ in range(8):
            values = values.sin()  # keeps its input
        return values.mean(1, keepdim=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_over_nccl_train_as_one_process(tmp_path: Path, strategy: str, ranks: int) -> None:
    """In fp64; SGD, as Adam divides by gradients that are rounding errors."""
    one = trial(**GPT, train={**STEPS, "clip_grad_norm": 1.0})
    expected = trained_weights(one, tmp_path)
    found = trained_weights(on_ranks(one, ranks, strategy=strategy), tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@NEEDS_CUDA
def test_offloaded_shards_train_as_one_process(tmp_path: Path) -> None:
    one = trial(**GPT, train={**STEPS, "clip_grad_norm": 1.0})
    offloaded = one.model_copy(update={"strategy": "fsdp", "options": {"cpu_offload": True}})
    expected, found = trained_weights(one, tmp_path), trained_weights(offloaded, tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_fp16_leaves_out_steps_until_the_scale_fits(tmp_path: Path, on_nonfinite: str) -> None:
    """None of them stops the training, and none leaves a trace in the weights."""
    sections = {"loss": {"_target_": "test_gpu.Steep"}, "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-4}}
    train = {"epochs": 12, "precision": "fp16", "on_nonfinite": on_nonfinite, "log_every_steps": 1}
    outcome, folder = launch(trial(**sections, train=train), tmp_path)
    result = result_of(outcome)
    weights = torch.load(folder / WEIGHTS, weights_only=True)
    assert all(value.isfinite().all() for value in weights.values())
    losses = series(folder, "train/loss")
    assert len(losses) == result.steps
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0] / 2
    if on_nonfinite == "skip":
        skipped = series(folder, "train/skipped_steps")[-1]
        assert 0 < skipped < len(losses) / 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_bf16_in_channels_last_trains_as_fp32(tmp_path: Path, is_compiled: bool) -> None:
    images = {"_target_": "test_gpu.images"}
    model = {"_target_": "pipeline.models.resnet18", "num_classes": 10, "width": 16}
    sections: dict[str, Any] = {"model": model, "data": images, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
    fast = {"precision": "bf16", "memory_format": "channels_last", **({"compile": True} if is_compiled else {})}
    (plain, _), (other, _) = (
        launch(trial(**sections, train={**STEPS, **how}), tmp_path) for how in ({"precision": "fp32"}, fast)
    )
    assert result_of(other).losses == pytest.approx(result_of(plain).losses, rel=0.05)


def images() -> tuple[torch.utils.data.TensorDataset, None]:
    """Noise (256, 3, 32, 32), a tenth brighter for each class."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (256,), generator=generator)
    noise = torch.randn(256, 3, 32, 32, generator=generator)
    return torch.utils.data.TensorDataset(noise + labels[:, None, None, None] / 10, labels), None


@NEEDS_CUDA
def test_peak_memory_is_that_of_torch(tmp_path: Path) -> None:
    outcome, _ = launch(trial(**GPT, train={**STEPS, "precision": "bf16"}), tmp_path)
    (peak,) = result_of(outcome).peak_memory_mb
    assert peak == pytest.approx(torch.cuda.max_memory_allocated() / 2**20, rel=1e-3)


@NEEDS_CUDA
def test_a_batch_without_memory_is_reported_as_such(tmp_path: Path) -> None:
    """At a real out-of-memory error, after which the next training has all of the memory again."""
    sections = {"model": {"_target_": "test_gpu.Hungry"}, "data": {"_target_": "toys.regression", "samples": 4096}}
    before = torch.cuda.memory_allocated()
    outcome, _ = launch(trial(**sections, train={"precision": "fp32", "global_batch_size": 4096}), tmp_path)
    assert isinstance(outcome.error, NoMemoryError)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**26
    result_of(launch(trial(train={"precision": "fp32"}), tmp_path)[0])


@NEEDS_CUDA
def test_utilization_and_energy_are_read(tmp_path: Path) -> None:
    model = {**GPT["model"], "width": 512, "depth": 6, "heads": 8}
    sections = {**GPT, "model": model, "data": {"_target_": "pipeline.data.characters", "context_length": 64}}
    outcome, _ = launch(trial(**sections, train={**STEPS, "steps": 300, "precision": "bf16"}), tmp_path)
    result = result_of(outcome)
    assert result.gpus == (torch.cuda.get_device_name(),)
    if not result.gpu_utilization:
        pytest.skip("NVML tells no utilization here, as of a part of a GPU (MIG)")
    (utilization,) = result.gpu_utilization
    assert 0 < utilization <= 100
    if result.energy is None:
        pytest.skip("NVML counts no energy here")
    assert result.energy.joules > 0
    assert result.energy.samples == result.whole_training
