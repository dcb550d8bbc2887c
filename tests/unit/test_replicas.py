"""The replicas of dp: their GPUs, precision and random numbers. Only a machine with several GPUs can train them."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

from threading import Thread
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.strategies.base import Strategy
from pipeline.tasks import StepOutput
from pipeline.training.build import build
from pipeline.training.model import parts
from pipeline.training.ranks.randomness import seed_all
from pipeline.training.ranks.rank_gpus import device_of
from pipeline.training.step.forward import accepted

GPU = torch.device("cuda", 0)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def dp(*, gpus: int) -> Strategy:
    layout = {"strategy": "dp", "device": "cuda", "devices_per_worker": gpus}
    return parts.strategy(toys.trial().model_copy(update=layout), device=GPU, rank=Rank(node="a"))


@pytest.mark.usefixtures("visible")
def test_there_is_one_on_each_gpu_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on all that are visible; and what is measured is measured there."""
    given = {}
    monkeypatch.setattr(nn.DataParallel, "__init__", lambda _, module, device_ids: given.update({module: device_ids}))
    strategy, model = dp(gpus=2), nn.Linear(3, 1)
    strategy.wrap(model)
    context = build(toys.trial(), rank=Rank())
    context.strategy = strategy

    assert list(given[model]) == [0, 1]
    assert context.gpus == [0, 1]


@pytest.mark.usefixtures("visible")
def test_several_processes_have_separate_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package's strategy, with several GPUs for each of several processes."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    layout = {"strategy": "dp", "device": "cuda", "devices_per_worker": 2}
    trial, rank = toys.trial().model_copy(update=layout), Rank(local_rank=3)
    assert parts.strategy(trial, device=device_of(trial, rank=rank), rank=rank).gpus == range(6, 8)


@pytest.mark.usefixtures("visible")
def test_fewer_gpus_than_planned_are_an_error() -> None:
    with pytest.raises(
        ExperimentError, match=r"parallel.gpus_per_worker: dp needs 9 GPUs in one process, but rank 0 on a "
        r"can use 8. Make the others visible with CUDA_VISIBLE_DEVICES, or set gpus_per_worker: 8",
    ):  # fmt: skip
        dp(gpus=9)


class Seen(nn.Module):
    """Returns the type that autocast computes in on GPUs."""

    def forward(self, inputs: Tensor, *, dtype: str) -> tuple[Tensor, str, torch.dtype]:
        return inputs, dtype, torch.get_autocast_dtype("cuda")


@pytest.mark.usefixtures("visible")
def test_each_computes_in_the_precision_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls each in a thread of its own, whose autocast is in fp16."""

    def in_threads(_: Any, replicas: list[Any], inputs: list[Any], named: list[Any]) -> list[Any]:
        outputs: list[Any] = []
        for each, arguments, options in zip(replicas, inputs, named, strict=True):
            (thread := Thread(target=lambda: outputs.append(each(*arguments, **options)))).start()  # noqa: B023
            thread.join()
        return outputs

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_threads)
    wrapped: Any = dp(gpus=2).wrap(Seen())
    row = torch.ones(1)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):  # its type counts all the same
        found = wrapped.parallel_apply([wrapped.module] * 2, [(row,)] * 2, [{"dtype": "a name of the model"}] * 2)

    assert found == [(row, "a name of the model", torch.bfloat16)] * 2


def test_each_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank draws those of its own seed, whichever of the visible GPUs it has."""
    gpus = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    seed_all(7, device=torch.device("cuda", 1))

    assert gpus[1].initial_seed() == 7
    assert len({gpu.initial_seed() for gpu in gpus}) == 3


def test_separate_losses_are_refused() -> None:
    context = build(toys.trial().model_copy(update={"strategy": "dp"}), rank=Rank())
    context.strategy.gpus = range(2)
    with pytest.raises(ExperimentError, match=r"parallel.strategy: with dp, the model returns a separate loss on each"):
        accepted(context, StepOutput(torch.ones(2), None, None))
