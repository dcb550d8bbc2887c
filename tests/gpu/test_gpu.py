"""Paths that need a CUDA GPU: NCCL, memory that runs out, fp16, offload, NVML. Every test is skipped without one.

Needs neither Ray, MLflow nor scikit-learn, so that the folder of `make gpu-kit` runs it, with `--noconftest`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline import registry
from pipeline.launchers.base import Session
from pipeline.protocol.events import WEIGHTS, Metrics
from pipeline.protocol.trial import Trial, Tuning
from pipeline.protocol.trial_outcome import Outcome
from pipeline.recording import journal
from pipeline.recording.recorder import Recorder

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
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


def trial(**sections: Any) -> Trial:
    """A training in this process, on one GPU; as a GPU's trial it isn't measured afterwards."""
    made = toys.trial(**sections)
    update = {"device": DEVICE, "devices_per_worker": int(DEVICE == "cuda"), "train_only": True}
    return made.model_copy(update={**update, "allowed": (*made.allowed, "test_gpu")})


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[Trial], tuple[Outcome, Path]]]:
    """Run a trial as the commands do: its launcher, its process group, its journal; return outcome and run's folder."""

    def launched(trial: Trial) -> tuple[Outcome, Path]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with closing(Recorder(folder, subscribers=[])) as recorder:
            session = Session(folder=folder, receive=recorder.receive, parallel=trial.experiment.parallel)
            with registry.load("launchers", trial.launcher).Launcher(session) as launcher:
                outcome: Outcome = launcher.launch(trial)
        if not outcome.has_ended:
            raise outcome.error
        return outcome, folder

    yield launched
    torch.cuda.empty_cache()


def series(folder: Path, name: str) -> list[float]:
    events = journal.read(folder / journal.FILE_NAME)
    return [p.value for event in events if isinstance(event, Metrics) for p in event.points if p.name == name]


Launch = Callable[[Trial], tuple[Outcome, Path]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [1, pytest.param(GPUS, marks=pytest.mark.skipif(GPUS < 2, reason="one GPU"))])
def test_ranks_over_nccl_train_as_one_process(launch: Launch, strategy: str, world_size: int) -> None:
    """In fp64; SGD, as Adam divides by gradients that are rounding errors."""
    one = trial(**GPT, train={**STEPS, "clip_grad_norm": 1.0})
    many = {"strategy": strategy, "workers": world_size, "launcher": "torchrun" if world_size > 1 else "inprocess"}
    (_, alone), (_, together) = launch(one), launch(one.model_copy(update=many))
    expected, found = (torch.load(folder / WEIGHTS, weights_only=True) for folder in (alone, together))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_offloaded_shards_train_as_one_process(launch: Launch) -> None:
    one = trial(**GPT, train={**STEPS, "clip_grad_norm": 1.0})
    offloaded = one.model_copy(update={"strategy": "fsdp", "options": {"cpu_offload": True}})
    (_, alone), (_, together) = launch(one), launch(offloaded)
    expected, found = (torch.load(folder / WEIGHTS, weights_only=True) for folder in (alone, together))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_fp16_leaves_out_steps_until_the_scale_fits(launch: Launch, on_nonfinite: str) -> None:
    """None of them stops the training, and none leaves a trace in the weights."""
    sections = {"loss": {"_target_": "test_gpu.Steep"}, "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-4}}
    train = {"epochs": 12, "precision": "fp16", "on_nonfinite": on_nonfinite, "log_every_steps": 1}
    outcome, folder = launch(trial(**sections, train=train))
    assert outcome.finished is not None
    weights = torch.load(folder / WEIGHTS, weights_only=True)
    assert all(value.isfinite().all() for value in weights.values())
    losses = series(folder, "train/loss")
    assert len(losses) == outcome.finished.result.steps
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0] / 2
    if on_nonfinite == "skip":
        skipped = series(folder, "train/skipped_steps")[-1]
        assert 0 < skipped < len(losses) / 2


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_bf16_in_channels_last_trains_as_fp32(launch: Launch, is_compiled: bool) -> None:
    images = {"_target_": "test_gpu.images"}
    model = {"_target_": "pipeline.models.resnet18", "num_classes": 10, "width": 16}
    sections: dict[str, Any] = {"model": model, "data": images, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
    fast = {"precision": "bf16", "memory_format": "channels_last", **({"compile": True} if is_compiled else {})}
    (plain, _), (other, _) = (
        launch(trial(**sections, train={**STEPS, **how})) for how in ({"precision": "fp32"}, fast)
    )
    assert plain.finished is not None
    assert other.finished is not None
    assert other.finished.result.losses == pytest.approx(plain.finished.result.losses, rel=0.05)


def images() -> tuple[torch.utils.data.TensorDataset, None]:
    """Noise (256, 3, 32, 32), a tenth brighter for each class."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (256,), generator=generator)
    noise = torch.randn(256, 3, 32, 32, generator=generator)
    return torch.utils.data.TensorDataset(noise + labels[:, None, None, None] / 10, labels), None


def test_peak_memory_is_that_of_torch(launch: Launch) -> None:
    torch.cuda.reset_peak_memory_stats()
    outcome, _ = launch(trial(**GPT, train={**STEPS, "precision": "bf16"}))
    assert outcome.finished is not None
    (peak,) = outcome.finished.result.peak_memory_mb
    assert peak == pytest.approx(torch.cuda.max_memory_allocated() / 2**20, rel=1e-3)


def test_a_batch_size_ends_at_the_memory_of_the_gpu(launch: Launch) -> None:
    """At a real out-of-memory error, after which the next training has all of the memory again."""
    sections = {"model": {"_target_": "test_gpu.Hungry"}, "data": {"_target_": "toys.regression", "samples": 4096}}
    hungry = trial(**sections, train={"precision": "fp32"})
    keys = ("name", "experiment", "strategy", "launcher", "workers", "devices_per_worker", "device", "cpus_per_worker")
    tuning = Tuning(**{key: getattr(hungry, key) for key in (*keys, "allowed")})
    before = torch.cuda.memory_allocated()
    outcome, _ = launch(tuning)
    sizes = outcome.batch_sizes
    assert sizes is not None
    assert sizes.largest_that_fits
    assert [one.batch_size for one in sizes.candidates if not one.fits], "memory never ran out"
    needed = sizes.largest_that_fits * 128
    total = torch.cuda.get_device_properties(0).total_memory / 2**20
    assert total / 2 < needed <= total
    assert torch.cuda.memory_allocated() - before < 2**26
    assert launch(trial(train={"precision": "fp32"}))[0].finished is not None


def test_utilization_and_energy_are_read(launch: Launch) -> None:
    model = {**GPT["model"], "width": 512, "depth": 6, "heads": 8}
    sections = {**GPT, "model": model, "data": {"_target_": "pipeline.data.characters", "context_length": 64}}
    outcome, _ = launch(trial(**sections, train={**STEPS, "steps": 300, "precision": "bf16"}))
    assert outcome.finished is not None
    result = outcome.finished.result
    assert result.gpus == (torch.cuda.get_device_name(),)
    if not result.gpu_utilization:
        pytest.skip("NVML tells no utilization here, as of a part of a GPU (MIG)")
    (utilization,) = result.gpu_utilization
    assert 0 < utilization <= 100
    if result.energy is None:
        pytest.skip("NVML counts no energy here")
    assert result.energy.joules > 0
    assert result.energy.samples == 300 * 32
