"""Spikes of gradient exchange: found in made intervals, of the link or of a rank that comes late."""

# promise: how long gradients are exchanged while training runs, and its spikes; on a link that is slowed in the middle

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import samples
import toys
from samples import MAIN, spread

from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import Communication, Flops
from pipeline.results.breakdown import parts_table
from pipeline.results.measured import iter_notes
from pipeline.results.speedup import facts_of, find_main, measure_rows
from pipeline.strategies.ddp import timed_of
from pipeline.train.build import build
from pipeline.train.gauges import CommunicationMeter, Lap

STEPS = 10
CALM = [(20.0, 22.0)] * 6
TOOK = "gradient synchronization{} took {} ms per step in steps {} to {}, {} times its median of {} ms: {}"
LONGEST, LATE = "on all ranks, longest on rank {} on node-{}", "the other ranks waited for rank 1 on node-b"


def told(*intervals: Sequence[float], seconds: float = 2.0) -> tuple[Communication | None, list[str]]:
    """The record of intervals, each with the exchange of both ranks, and its warnings."""
    outbox = toys.Kept()
    meter = CommunicationMeter(build(toys.trial(), rank=Rank(), outbox=outbox))
    meter._nodes = ["node-a", "node-b"]
    for number, ranks_ms in enumerate(intervals, start=1):
        meter.record(ranks_ms, lap=Lap(STEPS, 40, seconds), step=number * STEPS)
    return meter.result, outbox.warnings


@pytest.mark.parametrize(
    ("intervals", "spikes", "messages"),
    [
        ((*CALM, (180.0, 200.0)), 1, [TOOK.format("", 180, 61, 70, 9, 20, LONGEST.format(1, "b"))]),
        ((*CALM, (300.0, 21.0)), 1, [TOOK.format(" and waiting", 300, 61, 70, 14, 22, LATE)]),
        ((*CALM, (55.0, 60.0)), 0, []),
        ((*CALM, (80.0, 80.0)), 1, []),  # 0.6 s: in the report only
        ((*CALM, *[(80.0, 80.0)] * 2), 2, [TOOK.format("", 80, 71, 80, 4, 20, LONGEST.format(0, "a"))]),
        (((1.0, 1.0), (1.0, 1.0), (900.0, 900.0)), 0, []),
    ],
    ids=["a slow link", "a late rank", "short", "costs little", "adds up", "the first intervals are not judged"],
)
def test_a_spike_that_costs_something_is_told(
    intervals: Sequence[Sequence[float]], spikes: int, messages: list[str]
) -> None:
    result, found = told(*intervals)
    assert result is not None
    assert (result.spikes, found) == (spikes, messages)


def test_the_share_is_that_of_the_rank_that_waits_for_no_other_and_one_process_exchanges_nothing() -> None:
    assert told((50.0, 150.0))[0] == Communication(ms=50.0, share=0.25)
    assert told((math.nan, 4.0))[0] is None  # without a time
    result, outbox = toys.trained()
    assert result.communication is None
    assert outbox.series("time/window_communication_ms") == []


@pytest.mark.parametrize(
    ("steps", "every", "timed"),
    [(0, 100, 0), (9, 100, 9), (10, 100, 10), (99, 100, 10), (100, 100, 11), (11, 10, 10), (20, 10, 11), (39, 10, 12)],
)
def test_torch_times_the_first_steps_and_then_some(steps: int, every: int, timed: int) -> None:
    assert timed_of(steps, every=every) == timed


def test_the_result_says_what_the_exchange_takes() -> None:
    communication, _ = told(*CALM, (180.0, 200.0))
    assert communication is not None
    assert communication.lost_s == pytest.approx(1.6)
    end = samples.finished("main", spread(100.0), communication=12.0)
    result = end.result.model_copy(update={"communication": communication})
    row = find_main(measure_rows([MAIN], [end.model_copy(update={"result": result})]))
    facts = facts_of(row)
    assert (facts["communication_ms"].value, str(facts["communication_share"])) == (pytest.approx(42.9, abs=0.1), "21%")
    table = parts_table([row])
    assert table is not None
    (note,) = (note for note in table.notes if "synchronization" in note)
    assert note == (
        "Gradient synchronization took 42.9 ms of each step, from the first bucket sent to the last received, 12.0 ms "
        "of it while nothing else was computed (exposed communication)."
    )
    flops = Flops(of_sample={"fp32": 1.0}, uncounted=("aten::x",))
    row = replace(row, result=result.model_copy(update={"flops": flops}))
    spike, uncounted = list(iter_notes([row], row, has_advice=True))[-2:]
    assert spike.startswith(
        "1 spike of gradient synchronization cost 1.6 s: gradient synchronization took 180 ms per step"
    )
    assert uncounted == "TFLOP/s and MFU are lower bounds: the operations of aten::x are not counted."
