"""What one process does for several: dp's replicas on stand-ins of GPUs, losses over the global batch, waiting."""

# promise: dp on several GPUs, a rank's own GPU, memory for the baseline (stand-ins of GPUs)
# promise: losses over the whole global batch, at 1 and 2 workers and resumed; refused where there is none

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_contrastive
import toys
from torch import Tensor, nn

from pipeline.errors import ExperimentError, TrainingError
from pipeline.protocol.trial import Rank
from pipeline.strategies import dp as dp_strategy
from pipeline.strategies.base import Strategy
from pipeline.tasks import Loss, Trainee, gathered
from pipeline.tasks.gathering import Pass, current
from pipeline.train import ranks
from pipeline.train.costs import costs
from pipeline.train.measure import Afterwards
from pipeline.train.order import MicroBatch, seed_all
from pipeline.train.parts import build_strategy
from pipeline.train.ranks import device_of

# dp: only a machine with several GPUs trains them
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


# Losses over the global batch; what is refused in a training: test_training_errors.py


def test_outside_of_a_training_the_batch_is_the_global_batch() -> None:
    current.end()  # a training of another test may have failed within a pass
    rows = torch.rand(3, 2)
    assert gathered(rows) is rows


class Fake(SimpleNamespace):
    """What a pass reads of a training, which it only refers to weakly."""


def state(*, is_stream: bool = False, gpus: int = 1) -> Any:
    return Fake(
        accumulation=1, order=Fake(is_stream=is_stream), strategy=Fake(gpus=range(gpus)), trial=Fake(strategy="dp"),
        trainee=Fake(training=True), facts=Fake(gathers=True), rank=Rank(rank=1, world_size=2),
    )  # fmt: skip


PART = MicroBatch(step=0, epoch=0, indices=[1, 3, 5], weight=1, is_last=True, global_size=6)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (state(is_stream=True), "data: is iterable, but the task compares all samples .*; use a map-style dataset"),
        (state(gpus=2), "parallel.strategy: is dp, which divides it, but .*; use ddp"),
    ],
)
def test_ranks_without_a_part_of_it_are_refused(refused: Any, message: str) -> None:
    (one := Pass()).begin(refused, PART, exchange=True)
    with pytest.raises(ExperimentError, match=message):
        one.batch()


def test_a_prediction_is_refused() -> None:
    s = toys.built(**toy_contrastive.case("Similar"))
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    with pytest.raises(ExperimentError, match=r"task: calls pipeline\.tasks\.gathered, .* Remove --predict"):
        costs(s)


def test_without_communication_own_rows_stand_in_for_those_of_the_others() -> None:
    rows = torch.rand(3, 2)
    current.begin(s := state(), PART, exchange=False)
    try:
        found = gathered(rows)
    finally:
        current.end()
        del s
    assert torch.equal(found, torch.cat([rows, rows]))


# Ranks that wait for the transfer of the weights


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    made = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    return made


def fail() -> None:
    raise MemoryError("no room")


def test_a_rank_that_fails_ends_instead_of_leaving_the_others_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    s: Any = SimpleNamespace(rank=Rank(rank=1, world_size=2), trial=toys.trial(), outbox=toys.Kept())
    with pytest.raises(MemoryError):
        Afterwards(s).measure("the trace", fail)
    assert s.outbox.events == []


def test_ranks_wait_for_the_transfer_of_the_weights_without_a_collective(store: dist.HashStore) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(ranks.call_on_ranks, pytest.fail, what="weights", rank=Rank(rank=1, world_size=2))
        assert ranks.call_on_ranks(lambda: "sent", what="weights", rank=Rank(world_size=2)) == "sent"
        assert other.result() == "sent"


def test_ranks_that_wait_for_the_weights_fail_with_rank_0(store: dist.HashStore) -> None:
    """The store of an outer launcher outlives rank 0, whose error left the others waiting for ever."""
    with pytest.raises(MemoryError):
        ranks.call_on_ranks(fail, what="weights", rank=Rank(world_size=2))
    assert store.check(["weights (rank 0)"])
    with pytest.raises(TrainingError, match="rank 0 failed: MemoryError: no room"):
        ranks.call_on_ranks(fail, what="weights", rank=Rank(rank=1, world_size=2))
