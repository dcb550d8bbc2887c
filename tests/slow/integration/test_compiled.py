"""Trainings that torch.compile takes part in, to the end."""

# promise: torch.compile, EMA

from pathlib import Path
from typing import Any

import pytest
import toys

from pipeline.protocol.trial import Rank
from pipeline.train import trainer
from pipeline.train.run import train

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

STATIC: dict[str, Any] = {"data": {"_target_": "toys.regression", "samples": 24, "validation": 0}}
"""Batches of one size, so that one graph is compiled."""
MOMENTUM = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9}


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Compiled code, callbacks and settings of the compiler don't outlive a test."""
    yield
    import torch._dynamo
    import torch._dynamo.callback

    torch._dynamo.callback.callback_handler.clear()
    torch._dynamo.reset()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of compilation in each step of a training."""
    found: list[float] = []

    def watched(s: Any, *given: Any, **more: Any) -> Any:
        before = s.compiling.seconds if s.compiling else 0.0
        stepped = train_step(s, *given, **more)
        found.append(s.compiling.seconds - before if s.compiling else 0.0)
        return stepped

    train_step = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", watched)
    return found


def test_losses_are_the_same_and_compiling_is_over_before_the_first_step(seconds: list[float]) -> None:
    eager, plain = toys.trained(**STATIC, optimizer=MOMENTUM, train_only=False)
    seconds.clear()
    compiled = {"compile": {"fullgraph": True}}
    result, outbox = toys.trained(**STATIC, optimizer=MOMENTUM, train=compiled, train_only=False)
    assert outbox.series("train/loss") == pytest.approx(plain.series("train/loss"), abs=1e-12)
    assert len(set(plain.series("train/loss"))) == 6
    assert result.compile_s == pytest.approx(sum(seconds))
    assert seconds[0] > 0
    assert sum(seconds[1:]) == 0, "something was compiled during training, or while parts of a step were measured"
    assert result.flops == eager.flops is not None  # counted uncompiled
    assert outbox.files["model/weights.pt"].keys() == plain.files["model/weights.pt"].keys()


def test_batches_of_all_sizes_are_compiled_ahead(seconds: list[float]) -> None:
    """22 samples in batches of 8, in micro-batches of 4 and 3, with dropout, statistics and validation."""
    sections: dict[str, Any] = {"model": {"_target_": "toys.batch_norm_net"}}
    _, plain = toys.trained(**sections, train={"gradient_accumulation": 2})
    seconds.clear()
    _, outbox = toys.trained(**sections, train={"gradient_accumulation": 2, "compile": True})
    for name in ("train/loss", "validation/loss"):
        assert outbox.series(name) == pytest.approx(plain.series(name), abs=1e-12)
    assert seconds[-6:] == [0.0] * 6  # validation is compiled between the first two


def test_resuming_is_exact_to_the_bit(tmp_path: Path) -> None:
    def run(*, resume: bool) -> toys.Kept:
        sections: dict[str, Any] = {"model": {"_target_": "toys.dropout_net"}, "optimizer": MOMENTUM}
        keep, settings = {"every_steps": 1, "keep": 100}, {"compile": True, "precision": "fp32"}
        trial = toys.trial(**sections, checkpoint=keep, train=settings)
        outbox = toys.Kept()
        train(trial.model_copy(update={"checkpoints": str(tmp_path), "resume": resume}), rank=Rank(), outbox=outbox)
        return outbox

    whole = run(resume=False)
    for folder in tmp_path.glob("step-0000000[5-6]"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    again = run(resume=True)
    assert "resumed" in again.kinds()
    assert again.series("train/loss") == whole.series("train/loss")  # the first steps are told again
    assert again.series("validation/loss") == whole.series("validation/loss")
