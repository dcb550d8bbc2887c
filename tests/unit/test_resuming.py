"""A training that stopped after any step goes on as if it hadn't: the same losses, bit for bit."""

# promise: what leaves the tool computes what was evaluated; changed data is named on resume
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: resumed after any step, with each strategy, optimizer, scheduler; with a different number of workers
# promise: what a sample draws is the same at any world size, with any loader, after a resume

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import toys
from checkpointed import EVERY, STEPS, assert_equal, assert_same, resumed, run, until
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pipeline import registry
from pipeline.errors import ExperimentError
from pipeline.train.saved_state import STATE, map_state
from pipeline.train.storage import folder_name


def convolutions() -> nn.Module:
    """The second one has weights whose memory layout channels_last changes."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    )


class CodeInState(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler whose state can't be saved without pickle."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.secret = lambda: 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


HERE = "test_resuming"
SGD = {"_target_": "torch.optim.SGD", "lr": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": SGD,
    "momentum": {**SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 0.01, "amsgrad": True},
}
_SCHEDULERS = "torch.optim.lr_scheduler"
_PLATEAU = {"_target_": f"{_SCHEDULERS}.ReduceLROnPlateau", "patience": 0, "threshold": 10.0}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cosine, each step": {
        "scheduler": {"_target_": f"{_SCHEDULERS}.CosineAnnealingLR", "T_max": "${total_steps}"},
        "train": {"lr_scaling": {"rule": "linear", "base_batch_size": 4, "warmup_steps": 4}},
    },
    "plateau, each epoch": {"scheduler": _PLATEAU, "train": {"scheduler_interval": "epoch", "clip_grad_norm": 0.5}},
    "one cycle": {
        "scheduler": {"_target_": f"{_SCHEDULERS}.OneCycleLR", "max_lr": 0.1, "total_steps": "${total_steps}"}
    },
    "milestones": {
        "scheduler": {
            "_target_": f"{_SCHEDULERS}.SequentialLR",
            "schedulers": [
                {"_target_": f"{_SCHEDULERS}.LinearLR", "total_iters": 2},
                {"_target_": f"{_SCHEDULERS}.MultiStepLR", "milestones": [1, 2, 2]},
            ],
            "milestones": [2],
        },
        "train": {"gradient_accumulation": 2},
    },
}
STRATEGIES = registry.names("strategies")
PAIRS = [("SGD", "none"), *product(["momentum", "AdamW"], [name for name in SCHEDULERS if name != "none"])]
RICH: dict[str, Any] = {"model": {"_target_": "toys.rich_net"}, "data": {"_target_": "toys.augmented"}}


def _cases() -> Iterator[tuple[str, str, str, int]]:
    """Resume each scheduler after each step, with two optimizers in turn; a strategy has half of the steps."""
    for (optimizer, scheduler), step in product(PAIRS, range(1, STEPS + 1)):
        if optimizer != "SGD" and step % 2 != (optimizer == "momentum"):
            continue
        turn = 2 * list(OPTIMIZERS).index(optimizer) + list(SCHEDULERS).index(scheduler) + (step - 1) // 3
        yield STRATEGIES[turn % len(STRATEGIES)], optimizer, scheduler, step


CASES = list(_cases())


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """A strategy in one process, with what it needs."""
    name: str = request.param
    if not registry.load("strategies", name).Strategy.needs_process_group:
        yield name
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield name
    dist.destroy_process_group()


def train(folder: Path, **more: Any) -> toys.Kept:
    """Train in fp32, with a checkpoint of each step."""
    return run(folder, **{**EVERY, **more, "train": {"precision": "fp32", **more.get("train", {})}})


@pytest.fixture(scope="module")
def whole_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, toys.Kept]]:
    """Trainings that nothing stopped, by name: where their checkpoints are, and what came of them."""
    known: dict[str, tuple[Path, toys.Kept]] = {}

    def train_once(name: str, **sections: Any) -> tuple[Path, toys.Kept]:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[name] = folder, train(folder, **sections)
        return known[name]

    return train_once


@pytest.mark.parametrize(("strategy", "optimizer", "scheduler", "step"), CASES, indirect=["strategy"])
def test_a_training_resumed_after_any_step_is_the_same(
    whole_in: Callable[..., tuple[Path, toys.Kept]],
    tmp_path: Path,
    strategy: str,
    optimizer: str,
    scheduler: str,
    step: int,
) -> None:
    sections = {**RICH, "optimizer": OPTIMIZERS[optimizer], **SCHEDULERS[scheduler], "strategy": strategy}
    sections["options"] = {"find_unused_parameters": True} if strategy == "ddp" else {}
    where, whole = whole_in(f"{strategy}, {optimizer}, {scheduler}", **sections)
    assert len(set(whole.series("train/loss"))) == STEPS
    outbox = train(until(step, folder=where, to=tmp_path / "again"), resume=True, **sections)

    assert outbox.resumed == [step]
    assert outbox.result.losses == whole.result.losses
    assert outbox.result.metrics["validation/loss"] == whole.result.metrics["validation/loss"]
    if step < STEPS:
        assert_same(outbox, whole, after=step)


@pytest.mark.parametrize(
    ("interval", "lengths"),
    [
        ("step", [{"epochs": 2}, {"epochs": 4}]),
        ("epoch", [{"epochs": 2}, {"epochs": 4}]),
        ("epoch", [{"epochs": None, "steps": 5}, {"epochs": None, "steps": 10}]),
    ],
)
def test_a_finished_training_goes_on_as_one_that_was_as_long_from_the_start(
    tmp_path: Path, interval: str, lengths: list[dict[str, Any]]
) -> None:
    """Use a schedule of learning rates that doesn't depend on the length. No permission is needed."""

    def of_length(length: dict[str, Any], folder: str, **more: Any) -> toys.Kept:
        schedule = {"_target_": f"{_SCHEDULERS}.StepLR", "step_size": 3, "gamma": 0.7}
        sections = {**RICH, "optimizer": OPTIMIZERS["AdamW"], "scheduler": schedule, **more}
        return train(tmp_path / folder, **sections, train={**length, "scheduler_interval": interval})

    short, long = lengths
    whole, first, longer = (
        of_length(long, "whole"), of_length(short, "first"), of_length(long, "first", resume=True)
    )  # fmt: skip
    assert_same(longer, whole, after=first.result.steps)
    assert longer.result.metrics == whole.result.metrics
    assert longer.result.steps == 2 * first.result.steps


FORMATS: dict[str, dict[str, Any]] = {
    **{
        f"channels_last, {optimizer}": {
            "model": {"_target_": "test_resuming.convolutions"}, "data": {"_target_": "toys.images"},
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"}, "optimizer": OPTIMIZERS[optimizer],
            "train": {"epochs": 1, "precision": "fp32", "memory_format": "channels_last", "ema": {"decay": 0.5}},
        } for optimizer in ("momentum", "AdamW")
    },
    "scaled losses": {"train": {"precision": "fp16"}},
}  # fmt: skip
"""Fused kernels walk the memory of weights and moments, whatever their strides are."""


@pytest.mark.parametrize("case", FORMATS)
def test_types_and_memory_layouts_are_those_of_before(tmp_path: Path, case: str) -> None:
    assert_same(*resumed(tmp_path, after=2, **FORMATS[case]), after=2)


def test_the_next_checkpoints_are_the_same(tmp_path: Path) -> None:
    """Everything that is state: what a resumed training saves is what the other one saved, to the bit."""
    resumed(tmp_path, after=2, optimizer=OPTIMIZERS["AdamW"], **SCHEDULERS["one cycle"])
    for step in range(3, STEPS + 1):
        one, other = (torch.load(tmp_path / side / folder_name(step) / STATE) for side in ("whole", "after 2"))
        for state in (one, other):
            assert state.pop("meter")  # has times
        assert one["optimizer"]["state"]
        assert_equal(one, other)


class Drifting(nn.Module):
    """Depth by Python's generator, an average in a buffer that isn't saved, and a buffer that is made by training."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs)
        if self.training:
            if not hasattr(self, "largest"):
                self.register_buffer("largest", hidden.detach().abs().max(), persistent=False)
            self.average.lerp_(hidden.detach().mean(), 0.1)
            hidden = hidden if random.random() < 0.5 else 2 * hidden
        return hidden + self.average + 0.01 * getattr(self, "largest", 0.0)


class MixUp:
    """Mixes samples by NumPy's generator."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        share = float(np.random.beta(0.5, 0.5)) if model.training else 1.0
        inputs, targets = (share * part + (1 - share) * part.flip(0) for part in batch)
        error: Tensor = (model(inputs) - targets).pow(2).mean()
        return error


def test_a_step_that_draws_is_resumed_exactly(tmp_path: Path) -> None:
    drawing: dict[str, Any] = {
        "model": {"_target_": f"{HERE}.Drifting"}, "task": {"_target_": f"{HERE}.MixUp"}, "loss": None,
    }  # fmt: skip
    whole = run(tmp_path / "whole", **EVERY, **drawing)
    for step in (1, 3, 4):
        random.seed(step)  # whatever was drawn before
        np.random.seed(step)
        left = until(step, folder=tmp_path / "whole", to=tmp_path / f"until {step}")
        assert_same(run(left, resume=True, **EVERY, **drawing), whole, after=step)
    assert len(set(whole.series("train/loss"))) == STEPS


class TestAnotherExperiment:
    @pytest.mark.parametrize("allow_changed", [False, True])
    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"train": {"global_batch_size": 4}}, "train.global_batch_size: cannot change from 8 to 4 when resuming"),
            ({"data": {"_target_": "toys.regression", "samples": 30}}, "data: an epoch has 4 steps, but had 3 when"),
        ],
    )
    def test_whose_steps_are_other_positions_is_refused(
        self, tmp_path: Path, sections: dict[str, Any], message: str, allow_changed: bool
    ) -> None:
        run(tmp_path)
        with pytest.raises(ExperimentError, match=message):
            run(tmp_path, resume=True, allow_changed=allow_changed, **sections)

    def test_in_its_code_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = {"_target_": "toys.dropout_net"}
        run(tmp_path, model=own)
        monkeypatch.setattr(toys, "dropout_net", toys.batch_norm_net)
        with pytest.raises(ExperimentError, match=r"(?s)model: doesn't match its state in .*size mismatch for 0"):
            run(tmp_path, model=own, resume=True)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"_target_": "toys.nudged", "by": 1e-5}, "sample 17 of the training set has changed since step-00000006"),
            ({"_target_": "toys.regression", "validation": 9}, "the validation set has 9 samples, but had 10 when"),
        ],
    )  # fmt: skip
    def test_with_other_data_is_refused_unless_allowed(
        self, tmp_path: Path, data: dict[str, Any], message: str
    ) -> None:
        run(tmp_path)
        with pytest.raises(ExperimentError, match=f"data: {message}.*, or add --allow-changed") as error:
            run(tmp_path, resume=True, data=data)
        assert [problem.key for problem in error.value.problems] == ["data"]
        outbox = run(tmp_path, resume=True, allow_changed=True, data=data, train={"epochs": 3})

        (warning,) = outbox.warnings
        assert warning.startswith(f"data: {message}")
        assert outbox.result.steps == 9


FASTER = {"optimizer": {**SGD, "lr": 0.5}}


class TestAnAllowedChange:
    """What is written counts, as if it had been from the beginning."""

    @pytest.mark.parametrize(
        ("before", "changed"),
        [
            ({}, FASTER),
            (SCHEDULERS["one cycle"], {**SCHEDULERS["one cycle"], "train": {"epochs": 3}}),
            (SCHEDULERS["cosine, each step"], {**SCHEDULERS["cosine, each step"], **FASTER}),
            (SCHEDULERS["milestones"], {**SCHEDULERS["milestones"], **FASTER}),
        ],
        ids=["rate", "epochs", "rate under a scheduler", "rate under several schedulers"],
    )
    def test_decides_the_learning_rate(self, tmp_path: Path, before: dict[str, Any], changed: dict[str, Any]) -> None:
        run(tmp_path / "before", **EVERY, **before)
        expected = run(tmp_path / "after", **EVERY, **changed)
        folder = until(4, folder=tmp_path / "before", to=tmp_path / "resumed")
        outbox = run(folder, resume=True, allow_changed=True, **EVERY, **changed)

        assert outbox.resumed == [4]
        assert outbox.after(4, "train/learning_rate") == expected.after(4, "train/learning_rate")
        assert outbox.warnings == []

    def test_of_the_rate_says_that_a_plateau_starts_anew(self, tmp_path: Path) -> None:
        sections = {"scheduler": {**_PLATEAU, "factor": 0.5}, "train": {"scheduler_interval": "epoch", "epochs": 3}}
        run(tmp_path, **sections)
        sections["train"] = {"scheduler_interval": "epoch", "epochs": 4}
        outbox = run(tmp_path, resume=True, allow_changed=True, **sections, **FASTER)
        assert outbox.series("train/learning_rate")[-1] == pytest.approx(0.5)
        assert [warning for warning in outbox.warnings if "ReduceLROnPlateau's reductions" in warning]

    def test_of_the_length_keeps_what_a_scheduler_has_seen(self, tmp_path: Path) -> None:
        """Plateau has halved the rate before; only the rate's own change sets it anew."""
        plateau = {**_PLATEAU, "factor": 0.5}
        before, longer = (
            {"scheduler": plateau, "train": {"scheduler_interval": "epoch", "epochs": epochs}} for epochs in (3, 4)
        )
        expected = run(tmp_path, **before)
        outbox = run(tmp_path, resume=True, **longer)

        assert outbox.series("train/learning_rate")[: 3 * 3] == expected.series("train/learning_rate")
        assert outbox.series("train/learning_rate")[-1] < 0.05

    @pytest.mark.parametrize("before", [{"patience": 1}, None], ids=["more patient", "new"])
    def test_of_early_stopping_lets_the_training_go_on(self, tmp_path: Path, before: dict[str, Any] | None) -> None:
        """``min_delta`` is such that each evaluation but the first counts as one without improvement."""

        def of(patience: dict[str, Any] | None, **more: Any) -> toys.Kept:
            options = None if patience is None else {**patience, "min_delta": 100.0}
            return run(tmp_path, train={"epochs": 5 if before else 2, "early_stopping": options}, **more)

        first = of(before)
        assert (first.result.steps, bool(first.result.stopped_early)) == (6, before is not None)
        again = of({"patience": 3}, resume=True)
        assert (again.resumed, again.result.steps) == ([6], 12 if before else 6)
        assert bool(again.result.stopped_early) is (before is not None)


def test_a_state_is_plain_and_exact(tmp_path: Path) -> None:
    value = {
        "floats": [0.1 + 0.2, float("inf"), 5e-324, -0.0], "tuple": (1, (True, None)), "empty": [{}, ()],
        "numbered": {1: "a", (2, 3): b"b"}, "counter": Counter({30: 2}), "dtype": torch.float16, "complex": 1j,
        "tensors": [torch.ones(2), {"deep": torch.tensor(3)}],
    }  # fmt: skip
    torch.save(map_state(value, lambda one, _: one, place=()), tmp_path / "state.pt")
    assert_equal(torch.load(tmp_path / "state.pt", weights_only=True), value)


def test_a_state_that_needs_code_is_refused_before_training(tmp_path: Path) -> None:
    outbox = toys.Kept()
    message = r"scheduler: its state has a function \(secret\).*checkpoint.keep: 0"
    with pytest.raises(ExperimentError, match=message):
        run(tmp_path, outbox=outbox, scheduler={"_target_": "test_resuming.CodeInState"})
    assert outbox.saved == outbox.points("train/loss") == []
