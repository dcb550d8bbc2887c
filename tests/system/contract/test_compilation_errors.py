"""What torch.compile can't do is said by the key, and two trials of a process keep their compiled code."""

import logging
from typing import Any

import pytest
import toys
from torch import Tensor, nn

from pipeline import worker as main
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Failed
from pipeline.protocol.trial import Rank
from pipeline.train import compilation
from pipeline.train.compilation import explained

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

STATIC: dict[str, Any] = {"data": {"_target_": "toys.regression", "samples": 24, "validation": 0}}
"""Batches of one size, so that one graph is compiled."""


class Breaking(nn.Linear):
    """Decides by a value that a compiler doesn't know."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        outputs = super().forward(input)
        return -outputs if outputs.sum().item() > 0 else outputs


@pytest.fixture(autouse=True)
def as_before() -> Any:
    """Compiled code, callbacks and settings of the compiler don't outlive a test."""
    yield
    import torch._dynamo
    import torch._dynamo.callback

    torch._dynamo.callback.callback_handler.clear()
    torch._dynamo.reset()


class TestErrors:
    def test_without_a_compiler_on_a_node(self) -> None:
        import torch._inductor.config

        how = toys.experiment(train={"compile": True}).train.compile
        message = r"train.compile: torch can't compile this model: .*No working C\+\+ compiler found"
        with (
            torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
            pytest.raises(ExperimentError, match=message),
            explained(how),
        ):
            toys.trained(**STATIC, train={"compile": True})

    def test_of_a_part_that_cannot_be_compiled_whole(self, caplog: pytest.LogCaptureFixture) -> None:
        """With fullgraph, which was asked for; without, torch leaves that part as it is."""
        outbox = toys.Kept()
        model = {"_target_": "test_compilation_errors.Breaking", "in_features": 3, "out_features": 1}
        trial = toys.trial(**STATIC, model=model, train={"compile": {"fullgraph": True}})
        with caplog.at_level(logging.CRITICAL), pytest.raises(main.WorkerFailed):
            main.run(trial, rank=Rank(), outbox=outbox)
        (failed,) = (event for event in outbox.events if isinstance(event, Failed))
        assert failed.traceback == "", failed.error
        (problem,) = failed.problems
        assert problem.key == "train.compile"
        assert problem.message.startswith("torch can't compile this model: ")

    def test_of_too_many_sizes(self) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        how = toys.experiment(train={"compile": True}).train.compile
        with pytest.raises(ExperimentError, match=r"more than 64 shapes.*\{dynamic: true\}"), explained(how):
            raise FailOnRecompileLimitHit("recompile_limit reached")

    def test_of_others_stay_what_they_are(self) -> None:
        how = toys.experiment(train={"compile": True}).train.compile
        with pytest.raises(LookupError), explained(how):
            raise LookupError("the user's own mistake")
        with pytest.raises(LookupError), explained(None):
            raise LookupError("the user's own mistake")


def test_a_trial_next_to_another_leaves_it_its_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    compiled: list[int] = []

    def noted(graph: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        compiled.append(len(inputs[-1]))
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", noted)
    how = toys.experiment(train={"compile": True}).train.compile
    assert how is not None
    models = []
    for samples in (4, 8):
        models.append(model := nn.Linear(3, 1))
        given = {"threads": 1, "overlaps": True, "keeps_compiled": samples == 8}
        compilation.compile_parts([model], how, **given)
        model(torch.zeros(samples, 3))
    models[0](torch.zeros(4, 3))
    assert compiled == [4, 8]
