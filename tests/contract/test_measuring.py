"""What is measured after a training on two ranks: it ends on both, whatever fails, and the training's result stays."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranks import on_ranks
from torch import Tensor, nn

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.training.loop import train

CASES = ("branch", "one rank fails", "waits")


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


def trial(case: str) -> Trial:
    model = {"branch": "Branching", "one rank fails": "FailsOnOneRank"}.get(case)
    sections = {"model": {"_target_": f"test_measuring.{model}"}} if model else {}
    made = toys.trial(measures=True, **sections)
    options = {"find_unused_parameters": True} if case == "branch" else {}
    return made.model_copy(
        update={"allowed": (*made.allowed, "test_measuring"), "strategy": "ddp", "workers": 2, "options": options}
    )


def _train(rank: Rank, case: str, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    outbox = toys.Kept()
    result = train(trial(case), rank=rank, outbox=outbox)
    (folder / f"{rank.rank}.json").write_text(result.model_dump_json())
    told = [event.message for event in outbox.events if isinstance(event, Warned)]
    (folder / f"{rank.rank}.txt").write_text("\n".join(told))


@pytest.fixture(scope="module", params=CASES)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The case, and each rank's result and warnings."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(_train, request.param, folder, folder=folder)
    results = [TrialResult.model_validate_json((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return request.param, results, [(folder / f"{rank}.txt").read_text() for rank in range(2)]


def test_the_training_has_its_result_whatever_is_measured_afterwards(measured: Any) -> None:
    case, results, warnings = measured
    assert [result.steps for result in results] == [6, 6]
    assert results[0].parts.nodes == results[1].parts.nodes
    assert len(results[0].parts.nodes) == 2
    if case != "one rank fails":
        assert warnings == ["", ""]
        assert all(len(result.parts.ranks) == 2 and result.parts.sum_ms for result in results)
        return
    assert all(result.parts.compute_ms is None for result in results)
    assert warnings[1].startswith(
        "the parts of a step could not be measured on rank 1, the training is not affected: no"
    )
    assert warnings[0].count("could not be measured on rank 0") == 1
