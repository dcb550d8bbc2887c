"""What fails once a training is done costs its own figures and a line."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
import toys
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.protocol.rank import Rank
from pipeline.train import measure, ranks, report
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
    """The store of a rank whose group uses NCCL."""
    made = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(measure, "_AGREEMENT_S", 0.0)
    return made


def fail() -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("others", [0, 1])
def test_a_rank_that_fails_alone_ends_instead_of_leaving_the_others_in_a_kernel(
    others: int, store: dist.HashStore
) -> None:
    outbox = toys.Kept()
    s: Any = SimpleNamespace(rank=Rank(rank=1, world_size=2), trial=toys.trial(), outbox=outbox)
    afterwards = Afterwards(s)
    if others:
        store.add("main: the trace failed", 1)
        assert afterwards.measure("the trace", fail) is None
        assert afterwards.measure("the rest", lambda: 1) is None
    else:
        with pytest.raises(MemoryError):
            afterwards.measure("the trace", fail)
    assert len(outbox.events) == others


def test_ranks_wait_for_the_transfer_of_the_weights_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    answers = iter([False, False, True])
    store = SimpleNamespace(
        check=lambda _: next(answers), set=lambda key, _: done.append(key), get=lambda _: ranks._DONE.encode()
    )
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    for rank in (0, 1):
        ranks.call_on_first(lambda: done.append("sent"), what="weights", rank=Rank(rank=rank, world_size=2))
    assert done == ["sent", "weights (rank 0)"]
    assert next(answers, "asked until then") == "asked until then"

    calls: list[str] = []
    monkeypatch.setattr(report, "call_on_first", lambda do, what, rank: (calls.append(what), do()))
    _, outbox = toys.trained()
    assert calls == ["main: weights sent"]
    assert "model/weights.pt" in outbox.files


def test_ranks_that_wait_for_the_weights_fail_with_rank_0(store: dist.HashStore) -> None:
    """The store of an outer launcher outlives rank 0, whose error left the others waiting for ever."""
    with pytest.raises(MemoryError):
        ranks.call_on_first(fail, what="weights", rank=Rank(world_size=2))
    assert store.check(["weights (rank 0)"])
    with pytest.raises(TrainingError, match="rank 0 failed: MemoryError: no room"):
        ranks.call_on_first(fail, what="weights", rank=Rank(rank=1, world_size=2))
