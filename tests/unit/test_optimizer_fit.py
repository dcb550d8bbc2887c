"""Optimizers and gradients that fit, or are refused by name; learning rates scaled wherever they stand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpointed
import pytest
import torch
import toys
from checkpointed import EVERY, Saving, assert_same, until
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.train.build import build
from pipeline.train.state import State

HERE = "test_optimizer_fit"


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


def run(folder: Path | str = "", *, model: str = "", **sections: Any) -> Saving:
    if model:
        sections["model"] = {"_target_": model}
    return checkpointed.run(folder, allowed=HERE, **{**EVERY, **sections})


def built(**sections: Any) -> State:
    return build(checkpointed.trial("", allowed=HERE, **sections), rank=Rank())


def optimizer(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"torch.optim.{name}", "lr": 0.05, **arguments}


def exact_when_resumed(tmp_path: Path, **sections: Any) -> Saving:
    """Train; train once more from a checkpoint; compare to the bit."""
    whole = run(tmp_path / "whole", **sections)
    again = run(until(2, folder=tmp_path / "whole", to=tmp_path / "again"), resume=True, **sections)
    assert_same(again, whole, after=2)
    assert whole.warnings == again.warnings == []
    return whole


WORDS, BAG, ROTATING = "toys.SparseWords", "toys.SparseBag", f"{HERE}.Rotating"


class TestSparseGradients:
    @pytest.mark.parametrize(
        ("model", "chosen"),
        [(WORDS, optimizer("SGD", momentum=0.9)), (BAG, optimizer("SparseAdam"))],
        ids=["SGD", "SparseAdam"],
    )
    def test_train_and_resume_with_clipping(self, tmp_path: Path, model: str, chosen: dict[str, Any]) -> None:
        train = {"clip_grad_norm": 0.5, "on_nonfinite": "skip"}
        exact_when_resumed(tmp_path, model=model, optimizer=chosen, train=train)

    def test_train_what_dense_ones_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sections: dict[str, Any] = {"optimizer": optimizer("SGD", momentum=0.9), "train": {"clip_grad_norm": 0.1}}
        sparse = run(model=BAG, **sections)
        made = nn.EmbeddingBag.__init__
        monkeypatch.setattr(nn.EmbeddingBag, "__init__", lambda self, *a, **k: made(self, *a, **{**k, "sparse": False}))
        dense = run(model=BAG, **sections)

        for name in ("train/loss", "train/gradient_norm", "validation/loss"):
            assert sparse.series(name) == pytest.approx(dense.series(name), rel=1e-12, abs=1e-14)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"^optimizer: the step\(\) of LBFGS needs a closure, which is not supp"):
        built(optimizer=optimizer("LBFGS"))


class TestComplexParameters:
    def test_stay_complex_in_fp64(self) -> None:
        s = built(model={"_target_": ROTATING})
        state = s.model.state_dict()
        assert {name: own.dtype for name, own in state.items()} == dict.fromkeys(state, torch.complex128)
        assert all(own.imag.abs().max() > 0 for own in state.values())
        assert s.batches.place(torch.ones(1, dtype=torch.complex64)).dtype == torch.complex128

    def test_are_averaged_and_resumed(self, tmp_path: Path) -> None:
        averaged = exact_when_resumed(tmp_path, model=ROTATING, train={"ema": {"decay": 0.5}}).weights["weight"]
        assert averaged.is_complex()
        assert not torch.equal(averaged, run(model=ROTATING).weights["weight"])


FREE: dict[str, Any] = {"optimizer": {"_target_": f"{HERE}.ScheduleFree", "lr": 0.1}}


class TestOptimizersWithModes:
    def test_train_evaluate_and_export_in_the_right_one(self) -> None:
        """Next to a loop by hand, as the package's authors write it."""
        outbox, s = run(**FREE), built(**FREE)
        optimizer: Any = s.optimizers[""]
        validation: list[float] = []
        for epoch in range(2):
            optimizer.train()
            for _, batch in s.batches.stream(3 * epoch, last_step=3 * epoch + 3):
                inputs, targets = s.batches.place(batch)
                nn.functional.mse_loss(s.model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.eval()
            inputs, targets = s.batches.place(toys.regression()[1][:])  # type: ignore[index]
            validation.append(nn.functional.mse_loss(s.model(inputs), targets).item())
        assert outbox.series("validation/loss") == pytest.approx(validation, rel=1e-12)
        for name, own in s.model.state_dict().items():
            assert torch.allclose(own, outbox.weights[name], rtol=1e-12)

    def test_are_resumed_exactly(self, tmp_path: Path) -> None:
        exact_when_resumed(tmp_path, **FREE)

    def test_are_not_disturbed_by_evaluation(self) -> None:
        often, once = (run(**FREE, train={"epochs": 4, "evaluate_every_epochs": every}) for every in (1, 4))
        assert often.series("train/loss") == once.series("train/loss")
        assert len(often.series("validation/loss")) == 4

    def test_are_not_averaged_twice(self) -> None:
        message = r"^train\.ema: averages the weights, but ScheduleFree also does; remove train\.ema"
        with pytest.raises(ExperimentError, match=message):
            built(**FREE, train={"ema": True})


SCALED: dict[str, Any] = {"lr_scaling": {"rule": "linear", "base_batch_size": 2}}
"""To four times what the file has."""
CYCLES: list[tuple[str, dict[str, Any]]] = [
    ("OneCycleLR", {"max_lr": [0.1], "total_steps": "${total_steps}"}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}),
]


class TestScaledLearningRates:
    @pytest.mark.parametrize(("name", "arguments"), CYCLES)
    def test_reach_a_scheduler_with_rates_of_its_own(self, name: str, arguments: dict[str, Any]) -> None:
        scheduler = {"_target_": f"torch.optim.lr_scheduler.{name}", **arguments}
        plain, scaled = (
            run(scheduler=scheduler, optimizer=optimizer("SGD", momentum=0.9), train=train) for train in ({}, SCALED)
        )
        rates = [4 * rate for rate in plain.series("train/learning_rate")]
        assert scaled.series("train/learning_rate") == pytest.approx(rates, rel=1e-12)
        assert len(set(rates)) > 2

    def test_that_are_hidden_in_a_function_are_refused(self) -> None:
        hidden = {"_target_": "toys.one_cycle"}
        with pytest.raises(ExperimentError, match=r"^scheduler: .* whose rates override train\.lr_scaling"):
            built(scheduler=hidden, train=SCALED)
        built(scheduler=hidden)  # as it is without scaling
