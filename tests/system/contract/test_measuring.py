"""What is measured after a training on two ranks: it ends on both, whatever fails, and the training's result stays."""

from typing import Any

import pytest
import torch
import toys
from ranks import Ranks
from torch import Tensor, nn

from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import TrialResult

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "branch": ({"model": {"_target_": "test_measuring.Branching"}}, {"find_unused_parameters": True}),
    "one rank fails": ({"model": {"_target_": "test_measuring.FailsOnOneRank"}}, {}),
    "waits": ({}, {}),
}
"""Sections of the experiment and options of ddp."""


class Branching(nn.Module):
    """Takes one of two branches, which its inputs choose."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.positive, self.negative = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        branch = self.positive if self.passes % 3 else self.negative
        outputs: Tensor = self.always(inputs) + branch(inputs)
        return outputs


class FailsOnOneRank(nn.Linear):
    """Fails on rank 1 once the training is over."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes > 6 and torch.distributed.get_rank() == 1:
            raise MemoryError("no room on this rank")
        return super().forward(inputs)


def _train(rank: Rank, case: str) -> tuple[TrialResult, list[str]]:
    sections, options = CASES[case]
    result, outbox = toys.trained(
        rank=rank, train_only=False, strategy="ddp", workers=2, options=options, **sections
    )  # fmt: skip
    return result, [message for message in outbox.warnings if "could not be measured" in message]


@pytest.mark.parametrize("case", CASES)
def test_the_training_has_its_result_whatever_is_measured_afterwards(case: str) -> None:
    patience_s = 20 if case == "one rank fails" else 60  # the other rank waits as long for it
    with Ranks(2, timeout_s=patience_s) as ranks:  # processes that end, as a rank that fails does
        results, warnings = zip(*ranks.call(_train, case), strict=True)
    assert [result.steps for result in results] == [6, 6]
    assert results[0].parts.nodes == results[1].parts.nodes
    assert len(results[0].parts.nodes) == 2
    if case != "one rank fails":
        assert warnings == ([], [])
        assert all(len(result.parts.ranks) == 2 and result.parts.sum_ms for result in results)
        return
    assert all(result.parts.compute_ms is None for result in results)
    ((first,), (second,)) = warnings
    assert second.startswith("the parts of a step could not be measured on rank 1, the training is not affected: no")
    assert "could not be measured on rank 0" in first
