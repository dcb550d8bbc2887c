"""What fails once a training is done costs its own figures and a line."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
import toys
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.protocol.rank import Rank
from pipeline.train import ranks
from pipeline.train.measure import Afterwards
from pipeline.train.run import train


class Unstable(nn.Linear):
    """Fails once the training is over."""

    passes: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(3, 1)
        type(self).passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).passes += self.training
        if self.passes > 6:
            raise ValueError("an error of torch's\nwith more lines")
        return super().forward(inputs)


def test_a_probe_that_fails_costs_its_table_and_a_line() -> None:
    trial = toys.trial(model={"_target_": "test_afterwards.Unstable"}, measures=True)
    outbox = toys.Kept()
    result = train(
        trial.model_copy(update={"allowed": (*trial.allowed, "test_afterwards")}), rank=Rank(), outbox=outbox
    )

    assert (result.steps, len(result.losses)) == (6, 6)
    assert (result.parts.compute_ms, result.parts.rest_ms, result.parts.sum_ms) == (None, None, None)
    assert result.parts.data_wait_ms >= 0
    messages = [event.message for event in outbox.events if event.kind == "warned"]
    assert messages[0] == (
        "the parts of a step could not be measured, the training is not affected: an error of torch's"
    )
    assert outbox.kinds().count("trained") == 1


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
