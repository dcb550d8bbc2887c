"""torch.compile for real: the same losses, no compiler in what is timed, and its errors in words.

On a machine that has compiled these models before, torch's cache in the temporary directory makes this much faster.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toys

from pipeline import worker
from pipeline.contract import Rank
from pipeline.errors import ExperimentError
from pipeline.events import Failed
from pipeline.training import compilation, loop
from pipeline.training.clock import Clock
from pipeline.training.compilation import Stopwatch, explained
from pipeline.training.loop import train

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


@pytest.mark.deep
def test_losses_are_the_same_and_compiling_is_over_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_s: list[float] = []

    def step(setup: Any, stream: Any, *, step: int) -> Any:
        compiled_s.append(setup.compiling.seconds)
        return taken(setup, stream, step=step)

    _, plain = toys.trained(**STATIC, optimizer=MOMENTUM)
    taken = loop.optimizer_step
    monkeypatch.setattr(loop, "optimizer_step", step)
    result, outbox = toys.trained(**STATIC, optimizer=MOMENTUM, train={"compile": {"fullgraph": True}})

    assert outbox.series("train/loss") == pytest.approx(plain.series("train/loss"), abs=1e-12)
    assert len(set(plain.series("train/loss"))) == 6
    assert compiled_s[0] > 0
    assert set(compiled_s) == {compiled_s[0]}, "something was compiled during training"
    assert result.compile_s == compiled_s[0], "something was compiled while parts of a step were measured"
    assert outbox.files["model/weights.pt"].keys() == plain.files["model/weights.pt"].keys()


@pytest.mark.deep
def test_batches_of_all_sizes_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """22 samples in batches of 8, in micro-batches of 4 and 3, with dropout, statistics and validation."""
    monkeypatch.setattr(loop, "probe", lambda setup, **_: samples.parts(step_ms=5.0))
    sections: dict[str, Any] = {"model": {"_target_": "toys.batch_norm_net"}}
    _, plain = toys.trained(**sections, train={"gradient_accumulation": 2})
    seconds: list[float] = []
    monkeypatch.setattr(loop, "train_epoch", lambda setup, **more: _watched(setup, seconds, **more))
    _, outbox = toys.trained(**sections, train={"gradient_accumulation": 2, "compile": True})

    for name in ("train/loss", "validation/loss"):
        assert outbox.series(name) == pytest.approx(plain.series(name), abs=1e-12)
    assert seconds == [0.0, 0.0]


_train_epoch = loop.train_epoch


def _watched(setup: Any, seconds: list[float], **more: Any) -> None:
    before = setup.compiling.seconds
    _train_epoch(setup, **more)
    seconds.append(setup.compiling.seconds - before)


@pytest.mark.deep
def test_resuming_is_exact_to_the_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loop, "probe", lambda setup, **_: samples.parts(step_ms=5.0))

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


class TestTheClock:
    def test_leaves_out_what_a_compiler_has_disturbed(self) -> None:
        stopwatch = Stopwatch()
        clock = Clock(device=torch.device("cpu"), warmup_steps=0, compiling=stopwatch)
        clock.resume()
        told = []
        for seconds in (0.0, 1.5, 0.0):
            stopwatch.seconds += seconds
            told.append(clock.has_compiled)
            clock.count(clock.lap(steps=1, samples=8), is_disturbed=clock.has_compiled)

        assert told == [False, True, False]
        assert len(clock.laps) == len(clock.steady) == 2

    def test_has_nothing_to_do_with_what_was_compiled_in_between(self) -> None:
        stopwatch = Stopwatch()
        clock = Clock(device=torch.device("cpu"), warmup_steps=0, compiling=stopwatch)
        stopwatch.seconds = 1.5  # an evaluation, say
        clock.resume()
        assert not clock.has_compiled


class TestErrors:
    def test_without_a_compiler_on_a_node(self) -> None:
        import torch._inductor.config

        message = r"train.compile: needs a C\+\+ compiler on CPU, and this node has none"
        with (
            torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
            pytest.raises(ExperimentError, match=message),
        ):
            toys.trained(**STATIC, train={"compile": True})

    def test_of_a_part_that_cannot_be_compiled_whole(self, caplog: pytest.LogCaptureFixture) -> None:
        """With fullgraph, which was asked for; without, torch leaves that part as it is."""
        outbox = toys.Kept()
        trial = toys.trial(**STATIC, model={"_target_": "toys.Breaking"}, train={"compile": {"fullgraph": True}})
        with caplog.at_level(logging.CRITICAL), pytest.raises(worker.WorkerFailed):
            worker.run(trial, rank=Rank(), outbox=outbox)

        (failed,) = (event for event in outbox.events if isinstance(event, Failed))
        assert failed.traceback == "", failed.error
        (problem,) = failed.problems
        assert problem.key == "train.compile"
        assert problem.message.startswith("torch can't compile this model: ")

    def test_of_too_many_sizes(self) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        how = toys.experiment(train={"compile": True}).train.compile
        with pytest.raises(ExperimentError, match=r"more than 64 sizes.*\{dynamic: true\}"), explained(how):
            raise FailOnRecompileLimitHit("recompile_limit reached")

    def test_of_others_stay_what_they_are(self) -> None:
        how = toys.experiment(train={"compile": True}).train.compile
        with pytest.raises(LookupError), explained(how):
            raise LookupError("the user's own mistake")
        with pytest.raises(LookupError), compilation.explained(None):
            raise LookupError("the user's own mistake")
