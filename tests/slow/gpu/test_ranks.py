"""Ranks on GPUs: they fail, hang, are replicas of `dp`, run under Ray, and are measured.

What needs two GPUs is skipped with one, and pytest's summary says so. Needs neither MLflow nor scikit-learn, so that
the folder of `make gpu-bundle` runs it, with `--noconftest`; without Ray, which it leaves out, its test is skipped.
"""

# promise: what a GPU proves, and a table that says what has not run

import importlib.util
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from gpu_trials import (
    GPUS,
    IS_REHEARSAL,
    NEEDS_GPU,
    NEEDS_TWO_GPUS,
    RANKS,
    USERS_ERROR,
    baseline_of,
    launch,
    on_ranks,
    result_of,
    speedup_of,
    trained_weights,
    trial,
    with_baseline,
)
from torch import Tensor, nn

from pipeline.protocol.trial import Trial

pytestmark = NEEDS_GPU
STEPS = {"building": 0, "first step": 1, "third step": 3}
SOON_S = 25.0  # Seconds for an error to arrive and for all ranks to end, far less than parallel.timeout_s
HANG_S = 10.0
LONG = {"_target_": "toys.regression", "samples": 4096}
BRIEFLY = {"warmup_steps": 2, "steps": 2, "windows": 2, "rounds": 5}
FILLED = 0.65  # Part of a GPU's memory that the activations of a rank's batch take; the peak is a tenth above
COPIES = 16


class Replica(nn.Linear):
    """Notes where it computes in training, and in which type."""

    seen: ClassVar[set[tuple[str, torch.dtype]]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.training:
            self.seen.add((str(inputs.device), outputs.dtype))
        return outputs


class Repeated(nn.Module):
    """Applies one layer many times: much to compute for each byte of gradients."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.times = times

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        for _ in range(self.times):
            values = self.layer(values).tanh()
        outputs: Tensor = self.last(values)
        return outputs


class Filling(nn.Module):
    """Keeps ``floats`` floats of each sample until its backward pass; in a rehearsal ``most`` samples have room."""

    def __init__(self, floats: int, most: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.floats, self.most = floats, most

    def forward(self, inputs: Tensor) -> Tensor:
        if IS_REHEARSAL and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory, in a rehearsal")
        values = self.layer(inputs).expand(-1, self.floats // COPIES)
        for _ in range(COPIES):
            values = values.sin()  # keeps its input
        return values.mean(1, keepdim=True)


def faulty(fault: str, moment: str, mark: Path, **sections: Any) -> Trial:
    model = {"_target_": "gpu_trials.Faulty", "fault": fault, "step": STEPS[moment], "mark": str(mark)}
    return trial(model=model, train={"epochs": 4, "precision": "fp32"}, **sections)


@pytest.mark.parametrize("moment", STEPS)
@pytest.mark.parametrize("ranks", RANKS)
def test_an_error_of_the_last_rank_arrives_at_once(tmp_path: Path, ranks: int, moment: str) -> None:
    """The error of the last rank, while the other rank waits for it in a collective."""
    outcome, _ = launch(on_ranks(faulty("raises", moment, mark := tmp_path / "mark"), ranks), tmp_path)
    assert time.time() - mark.stat().st_mtime < SOON_S
    assert USERS_ERROR in str(outcome.error)
    assert [failure.rank.rank for failure in outcome.failures if failure.origin == "rank"] == [ranks - 1]


def test_an_error_ends_a_process_of_its_own(tmp_path: Path) -> None:
    made = on_ranks(faulty("raises", "third step", mark := tmp_path / "mark"), 1, launcher="torchrun")
    outcome, _ = launch(made, tmp_path)
    assert time.time() - mark.stat().st_mtime < SOON_S
    assert USERS_ERROR in str(outcome.error)


def test_a_training_follows_one_that_failed_in_the_same_process(tmp_path: Path) -> None:
    outcome, _ = launch(on_ranks(faulty("raises", "third step", tmp_path / "mark"), 1), tmp_path)
    assert outcome.has_failed
    result_of(launch(on_ranks(trial(train={"precision": "fp32"}), 1), tmp_path)[0])


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("moment", STEPS)
def test_a_rank_that_hangs_is_named(tmp_path: Path, moment: str) -> None:
    """By the hang detector, before NCCL aborts the ranks that wait for it."""
    made = faulty("hangs", moment, mark := tmp_path / "mark", parallel={"timeout_s": HANG_S})
    outcome, _ = launch(on_ranks(made, 2), tmp_path)
    assert time.time() - mark.stat().st_mtime < HANG_S + SOON_S
    assert str(outcome.error).startswith("rank 1 on ")
    assert "no progress for" in str(outcome.error)


@NEEDS_TWO_GPUS
def test_dp_trains_as_one_process(tmp_path: Path) -> None:
    expected, found = trained_weights(trial(), tmp_path), trained_weights(dp(trial(), replicas=2), tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_of_dp_compute_in_bf16_on_the_gpus_of_the_trial(tmp_path: Path, replicas: int) -> None:
    Replica.seen.clear()
    made = trial(
        model={"_target_": "test_ranks.Replica", "in_features": 3, "out_features": 1}, train={"precision": "bf16"}
    )
    result_of(launch(dp(made, replicas=replicas), tmp_path)[0])
    places = ["cpu"] if IS_REHEARSAL else [f"cuda:{index}" for index in range(replicas)]
    assert Replica.seen == {(place, torch.bfloat16) for place in places}


def dp(made: Trial, *, replicas: int) -> Trial:
    return made.model_copy(update={"strategy": "dp", "devices_per_worker": 0 if IS_REHEARSAL else replicas})


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed, which the bundle leaves out")
def test_ranks_under_ray_train_as_one_process(tmp_path: Path) -> None:
    """As many as there are GPUs."""
    expected = trained_weights(trial(), tmp_path)
    found = trained_weights(on_ranks(trial(), GPUS, launcher="ray"), tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_speedup_is_measured_next_to_the_training(tmp_path: Path, ranks: int) -> None:
    """Its baseline is built on the first GPU, next to the training."""
    size = {"width": 16, "times": 2} if IS_REHEARSAL else {"width": 2048, "times": 16}
    made = trial(
        train_only=False,
        model={"_target_": "test_ranks.Repeated", **size},
        data=LONG,
        benchmark=BRIEFLY,
        train={"precision": "fp32", "epochs": 2, "global_batch_size": 2048},
    )
    outcome, _ = launch(with_baseline(on_ranks(made, ranks)), tmp_path)
    speedup = speedup_of(outcome)
    assert IS_REHEARSAL or (1.2 if ranks == 2 else 0.5) < speedup < 3


@pytest.mark.parametrize("ranks", RANKS)
def test_a_training_that_fills_the_memory_has_a_speedup(tmp_path: Path, ranks: int) -> None:
    """The whole batch of two ranks has no room on one GPU: the baseline takes it in two micro-batches, and says so."""
    samples = 8
    memory = 2**20 if IS_REHEARSAL else torch.cuda.get_device_properties(0).total_memory
    floats = int(FILLED * memory / samples / 4)
    made = trial(
        train_only=False,
        model={"_target_": "test_ranks.Filling", "floats": floats, "most": samples},
        data={"_target_": "toys.regression", "samples": 8 * samples},
        benchmark=BRIEFLY,
        train={"precision": "fp32", "epochs": 1, "global_batch_size": samples * ranks},
    )
    outcome, _ = launch(with_baseline(on_ranks(made, ranks)), tmp_path)
    assert speedup_of(outcome) > 0
    assert IS_REHEARSAL or min(result_of(outcome).peak_memory_mb) * 2**20 > FILLED * memory
    assert baseline_of(outcome).micro_batches == (2 if ranks == 2 else None)
