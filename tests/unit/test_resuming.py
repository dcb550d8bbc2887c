"""A training that stopped after any step goes on as if it hadn't: the same losses, bit for bit."""

# promise: what leaves the tool computes what was evaluated; changed data is named on resume
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: resumed after any step, with each strategy, optimizer, scheduler; with a different number of workers

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from pipeline import registry
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Resumed, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import TrialResult
from pipeline.training.batches.order import SampleOrder
from pipeline.training.checkpoints.encoding import join, split
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

EVERY: dict[str, Any] = {"every_steps": 1, "keep": 100}
STEPS = 6
"""Two epochs of three steps."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"_target_": "torch.optim.SGD", "lr": 0.05},
    "momentum": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "AdamW": {"_target_": "torch.optim.AdamW", "lr": 0.01, "amsgrad": True},
}
_SCHEDULERS = "torch.optim.lr_scheduler"
SCHEDULERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cosine, each step": {
        "scheduler": {"_target_": f"{_SCHEDULERS}.CosineAnnealingLR", "T_max": "${total_steps}"},
        "train": {"lr_scaling": {"rule": "linear", "base_batch_size": 4, "warmup_steps": 4}},
    },
    "plateau, each epoch": {
        "scheduler": {"_target_": f"{_SCHEDULERS}.ReduceLROnPlateau", "patience": 0, "threshold": 10.0},
        "train": {"scheduler_interval": "epoch", "clip_grad_norm": 0.5},
    },
    "one cycle": {
        "scheduler": {"_target_": f"{_SCHEDULERS}.OneCycleLR", "max_lr": 0.1, "total_steps": "${total_steps}"},
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


def _cases() -> Iterator[tuple[str, str, str, int]]:
    """Resume each pair after each step, each half of the steps with another strategy."""
    for (optimizer, scheduler), step in product(PAIRS, range(1, STEPS + 1)):
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


def run(
    folder: Path, *, resume: bool = False, allow_changed: bool = False, strategy: str = "single",
    precision: str = "fp32", **sections: Any,
) -> tuple[TrialResult, toys.Kept]:  # fmt: skip
    sections["train"] = {"precision": precision, **sections.get("train", {})}
    trial = toys.trial(**{"checkpoint": EVERY, **sections})
    options = {"find_unused_parameters": True} if strategy == "ddp" else {}
    update = {"checkpoints": str(folder), "resume": resume, "strategy": strategy, "options": options}
    update |= {"allow_changed": allow_changed}
    trial = trial.model_copy(update=update)
    outbox = toys.Kept()
    return train(trial, rank=Rank(), outbox=outbox), outbox


Whole = tuple[Path, TrialResult, toys.Kept]
WholeIn = Callable[..., Whole]


@pytest.fixture(scope="module")
def whole_in(tmp_path_factory: pytest.TempPathFactory) -> WholeIn:
    """Trainings that nothing stopped, by name: where their checkpoints are, and what came of them."""
    known: dict[str, Whole] = {}

    def train_once(name: str, **sections: Any) -> Whole:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[name] = (folder, *run(folder, **sections))
        return known[name]

    return train_once


def until(step: int, *, folder: Path, to: Path) -> Path:
    """What a training that was killed after a step has left."""
    to.mkdir()
    for name in map(folder_name, range(1, step + 1)):
        shutil.copytree(folder / name, to / name)
    return to


def after(step: int, outbox: toys.Kept, name: str) -> list[Any]:
    """The points behind a step; a resumed training also repeats some from before it."""
    return [point for point in outbox.points(name) if point.step > step]


def test_each_strategy_is_resumed_with_each_optimizer_and_scheduler_and_after_each_step() -> None:
    for index, others in (
        (1, OPTIMIZERS.keys() - {"SGD"}),
        (2, SCHEDULERS.keys() - {"none"}),
        (3, range(1, STEPS + 1)),
    ):
        assert {(case[0], case[index]) for case in CASES} >= set(product(STRATEGIES, others))


@pytest.mark.parametrize(("strategy", "optimizer", "scheduler", "step"), CASES, indirect=["strategy"])
def test_a_training_resumed_after_any_step_is_the_same(
    whole_in: WholeIn, tmp_path: Path, strategy: str, optimizer: str, scheduler: str, step: int
) -> None:
    sections = {
        "model": {"_target_": "toys.rich_net"}, "data": {"_target_": "toys.augmented"},
        "optimizer": OPTIMIZERS[optimizer], **SCHEDULERS[scheduler],
    }  # fmt: skip
    where, whole, expected = whole_in(f"{strategy}, {optimizer}, {scheduler}", strategy=strategy, **sections)
    assert len(set(expected.series("train/loss"))) == STEPS
    folder = until(step, folder=where, to=tmp_path / f"until {step}")
    result, outbox = run(folder, resume=True, strategy=strategy, **sections)

    assert [event.step for event in outbox.events if isinstance(event, Resumed)] == [step]
    for name in ("train/loss", "train/learning_rate", "train/gradient_norm", "validation/loss"):
        assert after(step, outbox, name) == after(step, expected, name)
    assert result.losses == whole.losses
    assert result.metrics["validation/loss"] == whole.metrics["validation/loss"]
    for name, weights in expected.files["model/weights.pt"].items():
        assert torch.equal(weights, outbox.files["model/weights.pt"][name]), name


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_finished_training_goes_on_as_one_that_was_as_long_from_the_start(tmp_path: Path, interval: str) -> None:
    """Use a schedule of learning rates that doesn't depend on the length."""
    sections = {
        "model": {"_target_": "toys.rich_net"}, "data": {"_target_": "toys.augmented"},
        "optimizer": OPTIMIZERS["AdamW"],
        "scheduler": {"_target_": f"{_SCHEDULERS}.StepLR", "step_size": 3, "gamma": 0.7},
    }  # fmt: skip

    def length(epochs: int) -> dict[str, Any]:
        return {"epochs": epochs, "scheduler_interval": interval}

    whole, expected = run(tmp_path / "whole", **sections, train=length(4))
    run(tmp_path / "first", **sections, train=length(2))
    result, outbox = run(tmp_path / "first", resume=True, **sections, train=length(4))

    for name in ("train/loss", "train/learning_rate", "validation/loss"):
        assert after(STEPS, outbox, name) == after(STEPS, expected, name)
    assert result.metrics == whole.metrics
    assert result.steps == 2 * STEPS
    for name, weights in expected.files["model/weights.pt"].items():
        assert torch.equal(weights, outbox.files["model/weights.pt"][name]), name


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_a_resumed_optimizer_keeps_the_memory_layout_of_its_parameters(tmp_path: Path, optimizer: str) -> None:
    """Fused kernels walk the memory of weights and moments, whatever their strides are."""
    sections: dict[str, Any] = {
        "model": {"_target_": "toys.convolutions"}, "data": {"_target_": "toys.images"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "optimizer": OPTIMIZERS[optimizer],
        "train": {"epochs": 1, "memory_format": "channels_last", "ema": {"decay": 0.5}},
    }  # fmt: skip
    _, whole = run(tmp_path / "whole", **sections)
    _, resumed = run(until(2, folder=tmp_path / "whole", to=tmp_path / "again"), resume=True, **sections)
    for name, weights in whole.files["model/weights.pt"].items():
        assert torch.equal(weights, resumed.files["model/weights.pt"][name]), name


def test_the_next_checkpoints_are_the_same(tmp_path: Path) -> None:
    """Everything that is state: what a resumed training saves is what the other one saved, to the byte."""
    sections = {"optimizer": OPTIMIZERS["AdamW"], **SCHEDULERS["one cycle"], "precision": "fp64"}
    run(tmp_path / "whole", **sections)
    run(until(2, folder=tmp_path / "whole", to=tmp_path / "again"), resume=True, **sections)

    for step in range(3, STEPS + 1):
        one, other = (tmp_path / side / folder_name(step) / "state.safetensors" for side in ("whole", "again"))
        assert one.read_bytes() == other.read_bytes()


def test_only_the_samples_that_are_left_are_read(tmp_path: Path) -> None:
    read = toys._Augmented.read
    sections: dict[str, Any] = {"data": {"_target_": "toys.augmented"}, "tracking": {"log_model": False}}
    run(tmp_path / "whole", **sections)
    folder = until(2, folder=tmp_path / "whole", to=tmp_path / "again")
    read.clear()
    run(folder, resume=True, **sections)

    order = SampleOrder(samples=toys.SAMPLES, global_batch_size=8, seed=3)
    others = [index for index in read if index]  # the first sample is read more often, to see that it stays the same
    others = others[2 * (toys.SAMPLES - 1) + 1 :]  # each is read twice for the digest, the first once more
    left = [index for index in order.global_batch(0, 2) if index]
    assert others[: len(left)] == left
    assert Counter(others[len(left) :][: toys.SAMPLES - 1]) == Counter(range(1, toys.SAMPLES))


@given(
    st.builds(SampleOrder, samples=st.integers(1, 70), global_batch_size=st.integers(1, 20), seed=st.integers(0, 99)),
    st.data(),
)
def test_draws_from_a_step_on_are_the_last_of_all(order: SampleOrder, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, order.steps_per_epoch - 1))
    world_size = data.draw(st.integers(1, 5))
    rank = data.draw(st.integers(0, world_size - 1))
    everything = list(order.micro_batches(1, rank=rank, world_size=world_size, accumulation=2))
    left = list(order.micro_batches(1, rank=rank, world_size=world_size, accumulation=2, first=first))

    assert left == everything[len(everything) - len(left) :]
    assert sum(micro_batch.is_last for micro_batch in left) == order.steps_per_epoch - first


class TestAnotherExperiment:
    @pytest.mark.parametrize(
        ("sections", "key", "message"),
        [
            ({"train": {"global_batch_size": 4}}, "train.global_batch_size", "cannot change from 8 to 4 when resuming"),
            ({"data": {"_target_": "toys.regression", "samples": 30}}, "data", "an epoch has 4 steps, but had 3 when"),
            ({"model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}}, "model", "size mismatch"),
            ({"model": {"_target_": "toys.batch_norm_net"}}, "model", "doesn't match its state in the checkpoint"),
            ({"scheduler": SCHEDULERS["milestones"]["scheduler"]}, "scheduler", "is either in the experiment or in"),
        ],
    )  # fmt: skip
    def test_is_refused(self, tmp_path: Path, sections: dict[str, Any], key: str, message: str) -> None:
        run(tmp_path)
        with pytest.raises(ExperimentError, match=message) as error:
            run(tmp_path, resume=True, **sections)
        assert [problem.key for problem in error.value.problems] == [key]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (
                {"_target_": "toys.nudged", "by": 0.01},
                "sample 17 of the training set has changed since step-00000006 was",
            ),
            (
                {"_target_": "toys.regression", "validation": 9},
                "the validation set has 9 samples, but had 10 when step-",
            ),
        ],
    )
    def test_with_other_data_is_refused_unless_allowed(
        self, tmp_path: Path, data: dict[str, Any], message: str
    ) -> None:
        run(tmp_path)
        with pytest.raises(ExperimentError, match=f"data: {message}.*, or add --allow-changed") as error:
            run(tmp_path, resume=True, data=data)
        _, outbox = run(tmp_path, resume=True, allow_changed=True, data=data, train={"epochs": 3})

        assert [problem.key for problem in error.value.problems] == ["data"]
        (warning,) = (event.message for event in outbox.events if isinstance(event, Warned))
        assert warning.startswith(f"data: {message}")

    def test_with_other_roundings_is_warned_of(self, tmp_path: Path) -> None:
        run(tmp_path)
        _, outbox = run(tmp_path, resume=True, data={"_target_": "toys.nudged", "by": 1e-5}, train={"epochs": 3})

        (warning,) = (event.message for event in outbox.events if isinstance(event, Warned))
        assert warning == "data: 1 of 32 compared samples differ by at most 0.1% since step-00000006 was saved"


class TestAnAllowedChange:
    """What is written counts, as if it had been from the beginning."""

    @pytest.mark.parametrize(
        ("before", "changed"),
        [
            ({}, {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.5}}),
            (SCHEDULERS["one cycle"], {**SCHEDULERS["one cycle"], "train": {"epochs": 3}}),
            (
                SCHEDULERS["cosine, each step"],
                {**SCHEDULERS["cosine, each step"], "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.5}},
            ),
        ],
        ids=["rate", "epochs", "rate under a scheduler"],
    )
    def test_decides_the_learning_rate(self, tmp_path: Path, before: dict[str, Any], changed: dict[str, Any]) -> None:
        run(tmp_path / "before", **before)
        _, expected = run(tmp_path / "after", **changed)
        _, outbox = run(until(4, folder=tmp_path / "before", to=tmp_path / "resumed"), resume=True, **changed)

        assert after(4, outbox, "train/learning_rate") == after(4, expected, "train/learning_rate")
        assert [event.message for event in outbox.events if isinstance(event, Warned)] == []

    def test_keeps_what_a_scheduler_has_seen(self, tmp_path: Path) -> None:
        """Plateau has halved the rate before; only the rate's own change sets it anew."""
        plateau = {"_target_": f"{_SCHEDULERS}.ReduceLROnPlateau", "patience": 0, "threshold": 10.0, "factor": 0.5}
        sections = {"scheduler": plateau, "train": {"scheduler_interval": "epoch", "epochs": 3}}
        _, expected = run(tmp_path / "whole", **sections)
        longer = {**sections, "train": {"scheduler_interval": "epoch", "epochs": 4}}
        _, outbox = run(tmp_path / "whole", resume=True, **longer)

        assert outbox.series("train/learning_rate")[: 3 * 3] == expected.series("train/learning_rate")
        assert outbox.series("train/learning_rate")[-1] < 0.05

    def test_of_the_kind_of_optimizer_is_told(self, tmp_path: Path) -> None:
        run(tmp_path)
        adam = {"_target_": "torch.optim.AdamW", "lr": 0.01}
        result, outbox = run(tmp_path, resume=True, optimizer=adam, train={"epochs": 3})

        (warning,) = (event.message for event in outbox.events if isinstance(event, Warned))
        assert warning == "the optimizer class differs from step-00000006, so the optimizer starts without state"
        assert result.steps == 9


class TestState:
    def test_survives_json_exactly(self) -> None:
        value = {
            "floats": [0.1 + 0.2, float("inf"), 5e-324, -0.0], "tuple": (1, (True, None)), "empty": [{}, ()],
            "numbered": {1: "a", (2, 3): "b"}, "counter": Counter({30: 2}), "$tensor": "a text",
            "tensors": [torch.ones(2), {"deep": torch.tensor(3)}],
        }  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}
        again = join(split(value, name="x", tensors=tensors), tensors)

        assert tensors.keys() == {"x/tensors/0", "x/tensors/1/deep"}
        assert again["tensors"][1]["deep"] is value["tensors"][1]["deep"]  # type: ignore[index]
        assert repr({**again, "tensors": 0}) == repr({**value, "tensors": 0})

    def test_that_needs_code_is_refused_before_training(self, tmp_path: Path) -> None:
        outbox = toys.Kept()
        trial = toys.trial(scheduler={"_target_": "toys.CodeInState"}).model_copy(update={"checkpoints": str(tmp_path)})
        with pytest.raises(
            ExperimentError, match=r"scheduler: its state has a function \(secret\).*checkpoint.keep: 0"
        ):
            train(trial, rank=Rank(), outbox=outbox)
        assert "started" not in outbox.kinds()

    def test_of_the_loss_scaler_is_kept(self, tmp_path: Path) -> None:
        _, expected = run(tmp_path / "whole", precision="fp16")
        _, outbox = run(until(4, folder=tmp_path / "whole", to=tmp_path / "a"), resume=True, precision="fp16")

        assert after(4, outbox, "train/loss") == after(4, expected, "train/loss")
