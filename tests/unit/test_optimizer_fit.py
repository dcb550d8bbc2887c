"""Optimizers and gradients that fit, or are refused by name; learning rates scaled wherever they stand."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.context import TrainContext
from pipeline.training.loop import train

HERE = "test_optimizer_fit"


class Mixed(nn.Module):
    """A sparse embedding and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.words(inputs.abs().mul(2).long().clamp(max=5)).sum(1))
        return outputs


class OnlySparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(6, 1, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.words(inputs.abs().mul(2).long().clamp(max=5))
        return outputs


class Rotating(nn.Module):
    """A complex parameter and a complex buffer, whose imaginary parts matter."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1.0 + 0.5j, 0.5j, 1.0 + 0j]))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight * self.phase).imag.sum(1, keepdim=True)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682), with the interface of its authors' package."""

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "weight_sum": 0.0, "train_mode": False})

    def _move(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                weight = 1 - group["momentum"] if to_train else 1 - 1 / group["momentum"]
                for own in group["params"]:
                    if "z" in self.state[own]:
                        own.lerp_(self.state[own]["z"], weight)
                group["train_mode"] = to_train

    @torch.no_grad()
    def train(self) -> None:
        self._move(to_train=True)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(to_train=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            weight = group["lr"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
            for own in group["params"]:
                z = self.state[own].setdefault("z", own.detach().clone())
                own.lerp_(z, share)
                own.add_(own.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                z.sub_(own.grad, alpha=group["lr"])
            group["k"] += 1


def own_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=6)


def _trial(*, folder: Path | str = "", resume: bool = False, model: str = "", **sections: Any) -> Any:
    if model:
        sections["model"] = {"_target_": f"{HERE}.{model}"}
    trial = toys.trial(**{"checkpoint": {"every_steps": 1, "keep": 100}, **sections})
    update = {"allowed": (*trial.allowed, HERE), "checkpoints": str(folder), "resume": resume}
    return trial.model_copy(update=update)


def _build(**sections: Any) -> TrainContext:
    return build(_trial(**sections), rank=Rank())


def _train(**sections: Any) -> toys.Kept:
    outbox = toys.Kept()
    train(_trial(**sections), rank=Rank(), outbox=outbox)
    return outbox


def _refused(**sections: Any) -> tuple[str, str]:
    with pytest.raises(ExperimentError) as refused:
        _build(**sections)
    (problem,) = refused.value.problems
    return problem.key, problem.message


def _optimizer(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{name}", "lr": 0.05, **arguments}


def _exact_when_resumed(tmp_path: Path, *, after: int = 2, **sections: Any) -> toys.Kept:
    """Train; train once more from a checkpoint; compare to the bit."""
    whole = _train(folder=tmp_path / "whole", **sections)
    for name in map(folder_name, range(1, after + 1)):
        shutil.copytree(tmp_path / "whole" / name, tmp_path / "again" / name)
    again = _train(folder=tmp_path / "again", resume=True, **sections)
    for name in ("train/loss", "validation/loss"):
        before, now = ([p.value for p in kept.points(name) if p.step > after] for kept in (whole, again))
        assert before == now, name
        assert now
    for name, own in whole.files["model/weights.pt"].items():
        assert torch.equal(own, again.files["model/weights.pt"][name]), name
    assert not [event for event in (*whole.events, *again.events) if event.kind == "warned"]
    return whole


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, in Adagrad
class TestSparseGradients:
    @pytest.mark.parametrize(
        ("model", "optimizer"),
        [
            ("Mixed", _optimizer("SGD", momentum=0.9)),
            ("Mixed", _optimizer("Adagrad")),
            ("OnlySparse", _optimizer("SparseAdam")),
        ],
        ids=lambda value: value if isinstance(value, str) else value["_target_"].rpartition(".")[2],
    )
    def test_train_and_resume_with_clipping(self, tmp_path: Path, model: str, optimizer: dict[str, Any]) -> None:
        train = {"clip_grad_norm": 0.5, "on_nonfinite": "skip"}
        _exact_when_resumed(tmp_path, model=model, optimizer=optimizer, train=train)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_train_what_dense_ones_do(self, monkeypatch: pytest.MonkeyPatch, momentum: float) -> None:
        sections: dict[str, Any] = {
            "model": "OnlySparse", "optimizer": _optimizer("SGD", momentum=momentum), "train": {"clip_grad_norm": 0.1}
        }  # fmt: skip
        sparse = _train(**sections)
        made = nn.EmbeddingBag.__init__
        monkeypatch.setattr(nn.EmbeddingBag, "__init__", lambda self, *a, **k: made(self, *a, **{**k, "sparse": False}))
        dense = _train(**sections)

        for name in ("train/loss", "train/gradient_norm", "validation/loss"):
            assert sparse.series(name) == pytest.approx(dense.series(name), rel=1e-12, abs=1e-14)

    @pytest.mark.parametrize(
        ("model", "optimizer", "said"),
        [
            ("Mixed", _optimizer("AdamW"), "does not support sparse gradients"),
            ("Mixed", _optimizer("SGD", weight_decay=0.1), "Sparse gradients: words (sparse: true)"),
            ("Mixed", _optimizer("SparseAdam"), "does not support dense gradients"),
            ("", _optimizer("SparseAdam"), "does not support dense gradients"),
        ],
    )
    def test_that_an_optimizer_does_not_take_are_refused(
        self, model: str, optimizer: dict[str, Any], said: str
    ) -> None:
        key, message = _refused(model=model, optimizer=optimizer)

        assert key == "optimizer"
        assert said in message
        assert "Adagrad" in message


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    assert _refused(optimizer=_optimizer("LBFGS")) == (
        "optimizer",
        "the step() of LBFGS needs a closure, which is not supported. Use an optimizer that needs one forward and "
        "backward pass, e.g. torch.optim.AdamW.",
    )


class TestComplexParameters:
    def test_stay_complex_in_fp64(self) -> None:
        context = _build(model="Rotating")
        torch.manual_seed(0)

        state = context.model.state_dict()
        assert {name: own.dtype for name, own in state.items()} == dict.fromkeys(state, torch.complex128)
        assert all(own.imag.abs().max() > 0 for own in state.values())
        assert context.batches.placed(torch.ones(1, dtype=torch.complex64)).dtype == torch.complex128

    def test_train_in_fp64_what_they_do_in_fp32(self) -> None:
        exact, usual = (_train(model="Rotating", train={"precision": name}) for name in ("fp64", "fp32"))
        assert exact.series("train/loss") == pytest.approx(usual.series("train/loss"), rel=1e-5)

    def test_are_averaged_and_resumed(self, tmp_path: Path) -> None:
        outbox = _exact_when_resumed(tmp_path, model="Rotating", train={"ema": {"decay": 0.5}})

        averaged = outbox.files["model/weights.pt"]["weight"]
        assert averaged.is_complex()
        assert not torch.equal(averaged, _train(model="Rotating").files["model/weights.pt"]["weight"])

    def test_that_become_nan_are_told(self) -> None:
        context = _build(model="Rotating")
        with torch.no_grad():
            context.model.weight[0] = complex("nan")  # type: ignore[index,operator]
        with pytest.raises(Exception, match="weights are not finite"):
            loop.check_weights(context, step=1)


class TestOptimizersWithModes:
    FREE: dict[str, Any] = {"_target_": f"{HERE}.ScheduleFree", "lr": 0.1}

    def test_train_evaluate_and_export_in_the_right_one(self) -> None:
        """Beside a loop by hand, as the package's authors write it."""
        outbox = _train(optimizer=self.FREE)

        context = _build(optimizer=self.FREE)
        optimizer: Any = context.optimizer
        validation: list[float] = []
        for epoch in range(2):
            optimizer.train()
            for draw, batch in context.batches.training(epoch):
                inputs, targets = context.batches.placed(batch)
                nn.functional.mse_loss(context.model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert draw.is_last
            optimizer.eval()
            inputs, targets = context.batches.placed(toys.regression()[1][:])  # type: ignore[index]
            validation.append(nn.functional.mse_loss(context.model(inputs), targets).item())
        assert outbox.series("validation/loss") == pytest.approx(validation, rel=1e-12)
        exported = outbox.files["model/weights.pt"]
        assert all(torch.allclose(own, exported[name], rtol=1e-12) for name, own in context.model.state_dict().items())

    def test_are_resumed_exactly(self, tmp_path: Path) -> None:
        for after in (2, 3):
            _exact_when_resumed(tmp_path / str(after), after=after, optimizer=self.FREE)

    def test_go_on_when_the_training_is_made_longer(self, tmp_path: Path) -> None:
        expected = _train(optimizer=self.FREE, train={"epochs": 3})
        _train(folder=tmp_path, optimizer=self.FREE)
        longer = _train(folder=tmp_path, resume=True, optimizer=self.FREE, train={"epochs": 3})

        assert longer.series("validation/loss")[-1] == expected.series("validation/loss")[-1]
        assert longer.series("train/loss")[-3:] == expected.series("train/loss")[-3:]

    def test_are_not_disturbed_by_evaluation(self) -> None:
        often, once = (
            _train(optimizer=self.FREE, train={"epochs": 4, "evaluate_every_epochs": every}) for every in (1, 4)
        )

        assert often.series("train/loss") == once.series("train/loss")
        assert len(often.series("validation/loss")) == 4

    def test_are_not_averaged_twice(self) -> None:
        assert _refused(optimizer=self.FREE, train={"ema": True}) == (
            "train.ema",
            "averages the weights, but ScheduleFree also does; remove train.ema",
        )


class TestScaledLearningRates:
    SCALED: dict[str, Any] = {"lr_scaling": {"rule": "linear", "base_batch_size": 2}}
    """To four times what the file has."""
    CYCLES: dict[str, dict[str, Any]] = {
        "OneCycleLR": {"max_lr": 0.1, "total_steps": "${total_steps}"},
        "of each group": {"max_lr": [0.1], "total_steps": "${total_steps}"},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
    }

    @pytest.mark.parametrize("name", CYCLES)
    def test_reach_a_scheduler_with_rates_of_its_own(self, name: str) -> None:
        target = f"torch.optim.lr_scheduler.{name if name.endswith('LR') else 'OneCycleLR'}"
        sections: dict[str, Any] = {
            "scheduler": {"_target_": target, **self.CYCLES[name]}, "optimizer": _optimizer("SGD", momentum=0.9)
        }  # fmt: skip
        plain, scaled = (_train(**sections, train=train) for train in ({}, self.SCALED))

        rates = [4 * rate for rate in plain.series("train/learning_rate")]
        assert scaled.series("train/learning_rate") == pytest.approx(rates, rel=1e-12)
        assert len(set(rates)) > 2

    def test_that_are_hidden_in_a_function_are_refused(self) -> None:
        key, message = _refused(scheduler={"_target_": f"{HERE}.own_cycle"}, train=self.SCALED)

        assert key == "scheduler"
        assert "train.lr_scaling would have no effect" in message
        _build(scheduler={"_target_": f"{HERE}.own_cycle"})  # as it is without scaling
