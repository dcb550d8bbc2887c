"""Parameters of a loss or task are trained, saved, resumed and sent beside the model's, which stays what it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn
from torch._C._distributed_c10d import HashStore

from pipeline import registry
from pipeline.errors import TrainingError
from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.training.build import build
from pipeline.training.checkpoints.state import view
from pipeline.training.checks.nonfinite import check_weights
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluate
from pipeline.training.features.averaging import Averaging
from pipeline.training.loop import train
from pipeline.training.model import learned

LOSS = {"_target_": "toys.Uncertain"}
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.05}


@pytest.fixture(params=registry.names("strategies"))
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each strategy in one process, with what it needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def run(folder: Path | None = None, *, resume: bool = False, strategy: str = "single", **sections: Any) -> toys.Kept:
    trial = toys.trial(**{"loss": LOSS, "optimizer": ADAM, "checkpoint": {"every_steps": 1, "keep": 9}, **sections})
    update = {"checkpoints": str(folder or ""), "resume": resume, "strategy": strategy}
    outbox = toys.Kept()
    train(trial.model_copy(update=update), rank=Rank(), outbox=outbox)
    return outbox


def built(**sections: Any) -> TrainContext:
    return build(toys.trial(**{"loss": LOSS, "optimizer": ADAM, **sections}), rank=Rank())


def test_a_resumed_training_goes_on_with_what_the_loss_has_learned(tmp_path: Path, strategy: str) -> None:
    whole = run(tmp_path, strategy=strategy, train={"clip_grad_norm": 0.5, "ema": {"decay": 0.5}})
    for step in (4, 5, 6):
        for file in (tmp_path / f"step-{step:08d}").iterdir():
            file.unlink()
    resumed = run(tmp_path, resume=True, strategy=strategy, train={"clip_grad_norm": 0.5, "ema": {"decay": 0.5}})

    for name in ("train/loss", "train/gradient_norm", "validation/loss"):
        ends = [[(point.step, point.value) for point in one.points(name)] for one in (whole, resumed)]
        assert ends[0][-1:] == ends[1][-1:]
        assert set(ends[1]) <= set(ends[0])
    assert float(whole.files["model/loss.pt"]["scale"]) != 0
    for name in ("model/loss.pt", "model/weights.pt"):
        assert all(torch.equal(value, resumed.files[name][key]) for key, value in whole.files[name].items())


def test_it_is_sent_beside_the_model() -> None:
    outbox = run()

    assert list(outbox.files) == ["model/weights.pt", "model/loss.pt", "model/example.pt", "model/reference.pt"]
    assert list(outbox.files["model/weights.pt"]) == ["weight", "bias"]
    assert list(outbox.files["model/loss.pt"]) == ["scale", "calls", "factor"]  # not what is frozen
    assert [kind for kind in outbox.kinds() if kind.endswith("_saved")] == ["artifact_saved", "model_saved"]


def test_a_loss_without_parameters_changes_nothing() -> None:
    context = built(loss={"_target_": "torch.nn.CrossEntropyLoss"})

    assert context.learned is None
    assert context.whole is context.model
    assert len(context.optimizer.param_groups) == 1
    assert view(context).values["task"] is None


def test_trying_and_evaluating_leave_a_loss_as_it_is() -> None:
    context = built()
    assert isinstance(context.learned, toys.Uncertain)
    assert context.learned.calls == 0
    evaluate(context)

    assert context.learned.calls == 0
    assert context.learned.training


def test_averages_are_of_all_that_is_trained() -> None:
    context = built(train={"ema": {"decay": 0.5}})
    assert list(toys.feature(context, Averaging).averages.tensors) == ["weight", "bias", "task:scale"]


def test_what_is_written_counts_if_the_loss_was_changed(tmp_path: Path) -> None:
    run(tmp_path, train={"epochs": 1})
    changed = run(tmp_path, resume=True, loss={**LOSS, "factor": 2.0})

    assert float(changed.files["model/loss.pt"]["factor"]) == 2
    assert not [event for event in changed.events if isinstance(event, Warned)]


def test_a_weight_that_is_not_finite_is_found() -> None:
    context = built()
    with torch.no_grad():
        context.parameters[-1].fill_(float("nan"))

    with pytest.raises(TrainingError, match="weights are not finite after step 1"):
        check_weights(context, step=1)


def test_attributes_of_a_plain_task_are_found() -> None:
    class Plain:
        def __init__(self) -> None:
            self.head, self.centre, self.name = nn.Linear(2, 1), nn.Parameter(torch.ones(3)), "plain"

    found = learned.learned_by(Plain())
    assert found is not None
    assert list(learned.kept(found)) == ["centre", "head.weight", "head.bias"]
    assert learned.learned_by(lambda model, batch: None) is None
    assert learned.learned_by(nn.CrossEntropyLoss(weight=torch.ones(3))) is None
