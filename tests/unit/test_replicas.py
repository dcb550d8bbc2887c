"""The replicas of dp: their GPUs, precision, sums and random numbers. Only a machine with several GPUs trains them."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.rank import Rank
from pipeline.strategies import dp as dp_strategy
from pipeline.strategies.base import Strategy
from pipeline.tasks import Loss, Trainee
from pipeline.tasks.gathering import current
from pipeline.train.parts import build_strategy
from pipeline.train.ranks import device_of
from pipeline.train.seeds import seed_all

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def dp(*, gpus: int, rank: Rank = Rank(node="a"), device: torch.device = GPU) -> Strategy:  # noqa: B008
    layout = {"strategy": "dp", "device": "cuda", "devices_per_worker": gpus}
    return build_strategy(toys.trial().model_copy(update=layout), device=device, rank=rank, compute_dtype=None)


def test_there_is_one_on_each_gpu_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on all that are visible; and what is measured is measured there."""
    given = {}
    monkeypatch.setattr(nn.DataParallel, "__init__", lambda _, module, device_ids: given.update({module: device_ids}))
    strategy, trainee = dp(gpus=2), Trainee(nn.Linear(3, 1), nn.MSELoss())
    strategy.wrap(trainee)
    assert list(given[trainee]) == list(strategy.gpus) == [0, 1]
    assert dp(gpus=1).wrap(trainee) is trainee


def test_several_processes_have_separate_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package's strategy, with several GPUs for each of several processes."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    layout, rank = {"strategy": "dp", "device": "cuda", "devices_per_worker": 2}, Rank(local_rank=3)
    device = device_of(toys.trial().model_copy(update=layout), rank=rank)
    assert dp(gpus=2, rank=rank, device=device).gpus == range(6, 8)


def test_fewer_gpus_than_planned_are_an_error() -> None:
    with pytest.raises(
        ExperimentError, match=r"parallel.gpus_per_worker: dp needs 9 GPUs in one process, but rank 0 on a "
        r"can use 8. Make the others visible with CUDA_VISIBLE_DEVICES, or set gpus_per_worker: 8",
    ):  # fmt: skip
        dp(gpus=9)


def in_threads(_: Any, replicas: list[Any], inputs: list[Any], named: list[Any]) -> list[Any]:
    """torch calls each in a thread of its own, whose autocast is in fp16."""
    outputs: list[Any] = []
    for each, arguments, options in zip(replicas, inputs, named, strict=True):
        (thread := Thread(target=lambda: outputs.append(each(*arguments, **options)))).start()  # noqa: B023
        thread.join()
    return outputs


class Replicated:
    """dp's wrapper of a task, whose replicas get the rows of a batch; all on the CPU."""

    def __init__(self, task: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_threads)
        monkeypatch.setattr(dp_strategy, "gather", lambda parts, device: torch.cat(parts))
        self.trainee = Trainee(nn.Linear(3, 1), task)
        self.trainee.keeps_outputs = True
        self.wrapped: Any = object.__new__(dp_strategy._SummingDataParallel)
        nn.Module.__init__(self.wrapped)

    def __call__(self, *parts: Any) -> Loss:
        current.samples = None  # as forward does
        found = self.wrapped.parallel_apply([self.trainee] * len(parts), [(one,) for one in parts], [{}] * len(parts))
        loss: Loss = self.wrapped.gather(found, "cpu")
        return loss


def mean(model: nn.Module, batch: Any) -> Loss:
    outputs = model(batch[0])
    losses = (outputs - batch[1]).square()
    return Loss(losses.sum(), None, outputs, batch[1], {"far": losses.mean()})


def of_the_positive(model: nn.Module, batch: Any) -> Loss:
    outputs, counted = model(batch[0]), batch[1] > 0
    losses = (outputs - batch[1]).square() * counted
    return Loss(losses.sum(), counted.sum(), outputs, batch[1], {"far": losses.sum() / counted.sum()})


@pytest.mark.parametrize("task", [mean, of_the_positive, nn.MSELoss()], ids=["samples", "items", "a plain mean"])
def test_their_sums_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch, task: Any) -> None:
    """Also where one has no items, whose logs are NaN."""
    if isinstance(task, nn.Module):
        loss_of, task = task, lambda model, batch: loss_of(model(batch[0]), batch[1])
    inputs, targets = torch.randn(5, 3), torch.tensor([-1.0, -2, 3, 4, -5])[:, None]
    replicated = Replicated(task, monkeypatch)
    whole = replicated.trainee((inputs, targets))
    found = replicated((inputs[:2], targets[:2]), (inputs[2:], targets[2:]))
    torch.testing.assert_close(found.sum, whole.sum)
    assert found.count == whole.count
    for name, log in whole.logs.items():
        torch.testing.assert_close(found.logs[name], log)
    if whole.outputs is not None:
        torch.testing.assert_close(found.outputs, whole.outputs)


def test_each_computes_in_the_precision_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        seen.append(torch.get_autocast_dtype("cuda"))
        return model(batch[0]).mean()  # type: ignore[no-any-return]

    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):  # its type counts all the same
        Replicated(noting, monkeypatch)(*[(torch.ones(1, 3),)] * 2)
    assert seen == [torch.bfloat16] * 2


def test_each_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank draws those of its own seed, whichever of the visible GPUs it has."""
    gpus = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    seed_all(7, device=torch.device("cuda", 1))
    assert gpus[1].initial_seed() == 7
    assert len({gpu.initial_seed() for gpu in gpus}) == 3
