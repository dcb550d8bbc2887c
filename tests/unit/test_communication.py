"""Spikes of gradient exchange: found in made intervals, of the link or of a rank that comes late."""

# promise: how long gradients are exchanged while training runs, and its spikes; on a link that is slowed in the middle

import math
from collections.abc import Sequence

import pytest
import samples
import toys
from samples import MAIN, spread

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import Communication
from pipeline.report.numbers.row import Row
from pipeline.report.text.sentences import describe_communication
from pipeline.strategies.ddp import timed_of
from pipeline.training.build import build
from pipeline.training.meters.clock import Lap
from pipeline.training.meters.communication import CommunicationMeter

STEPS = 10


def told(*intervals: Sequence[float], seconds: float = 2.0) -> tuple[CommunicationMeter, list[str]]:
    """A meter that has recorded intervals, each with the exchange of both ranks, and its warnings."""
    outbox = toys.Kept()
    meter = CommunicationMeter(build(toys.trial(), rank=Rank()), outbox)
    meter.nodes = ["node-a", "node-b"]
    for number, ranks_ms in enumerate(intervals, start=1):
        meter.record(ranks_ms, lap=Lap(STEPS, 40, seconds), step=number * STEPS)
    return meter, [event.message for event in outbox.events if isinstance(event, Warned)]


CALM = [(20.0, 22.0)] * 6


def test_a_slow_link_is_told_with_the_rank_that_it_holds_up_longest() -> None:
    meter, messages = told(*CALM, (180.0, 200.0))
    assert messages == [
        "gradient synchronization took 180 ms per step in steps 61 to 70, 9 times its median of 20 ms: on all ranks, "
        "longest on "
        "rank 1 on node-b"
    ]
    result = meter.result
    assert result is not None
    assert (result.spikes, result.lost_s) == (1, pytest.approx(1.6))


def test_ranks_that_wait_for_one_are_told_for_which() -> None:
    _, messages = told(*CALM, (300.0, 21.0))
    assert messages == [
        "gradient synchronization took 300 ms per step in steps 61 to 70, 14 times its median of 22 ms: the other "
        "ranks waited "
        "for rank 1 on node-b"
    ]


@pytest.mark.parametrize("last", [(55.0, 60.0), (80.0, 80.0)])
def test_what_is_short_or_costs_little_is_not_told(last: tuple[float, float]) -> None:
    meter, messages = told(*CALM, last)
    assert messages == []
    assert meter.result is not None
    assert meter.result.spikes == (last == (80.0, 80.0))  # 0.6 s: in the report only


def test_the_first_intervals_are_not_judged() -> None:
    assert told((1.0, 1.0), (1.0, 1.0), (900.0, 900.0))[1] == []


def test_the_share_is_that_of_the_rank_that_waits_for_no_other() -> None:
    meter, _ = told((50.0, 150.0), seconds=2.0)
    assert meter.result == Communication(ms=50.0, share=0.25)


def test_an_interval_without_a_time_is_left_out() -> None:
    meter, _ = told((math.nan, 4.0))
    assert meter.result is None


def test_one_process_exchanges_nothing() -> None:
    result, outbox = toys.trained()
    assert result.communication is None
    assert outbox.series("time/window_communication_ms") == []


@pytest.mark.parametrize(
    ("steps", "every", "timed"),
    [(0, 100, 0), (9, 100, 9), (10, 100, 10), (99, 100, 10), (100, 100, 11), (11, 10, 10), (20, 10, 11), (39, 10, 12)],
)
def test_torch_times_the_first_steps_and_then_some(steps: int, every: int, timed: int) -> None:
    assert timed_of(steps, every=every) == timed


def test_the_report_says_what_the_exchange_takes() -> None:
    meter, _ = told(*CALM, (180.0, 200.0))
    end = samples.finished("main", spread(100.0), communication=12.0)
    row = Row.of(
        MAIN, [end.model_copy(update={"result": end.result.model_copy(update={"communication": meter.result})})]
    )
    first, second = describe_communication(row)
    assert first == (
        "Gradient synchronization took 42.9 ms per step in total, overlapped or not: 21% of a step while it trained."
    )
    quiet = meter.result.model_copy(update={"lost_s": 0.04})
    assert (
        len(list(describe_communication(row.model_copy(update={"communication": quiet})))) == 1
    )  # not "1 spike, which cost 0.0 s"
    assert second.startswith(
        "1 spike, which cost 1.6 s: gradient synchronization took 180 ms per step in steps 61 to 70"
    )
