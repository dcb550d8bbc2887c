"""What fails once a training is done costs its own figures and a line."""

from typing import ClassVar

import toys
from torch import Tensor, nn

from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import Spread
from pipeline.training.loop import train


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
    trial = toys.trial(model={"_target_": "test_afterwards.Unstable"})
    outbox = toys.Kept()
    result = train(
        trial.model_copy(update={"allowed": (*trial.allowed, "test_afterwards")}), rank=Rank(), outbox=outbox
    )

    assert (result.steps, len(result.losses)) == (6, 6)
    assert (result.parts.compute_ms, result.parts.rest_ms, result.parts.sum_ms) == (None, None, None)
    assert result.parts.data_wait_ms >= 0
    assert isinstance(result.samples_per_second, Spread)
    messages = [event.message for event in outbox.events if event.kind == "warned"]
    assert messages[0] == (
        "the parts of a step could not be measured, the training is not affected: an error of torch's"
    )
    assert outbox.kinds().count("trained") == 1
