"""What counts as steady state, and the loss of every step."""

from collections.abc import Iterator

import pytest
import torch
import toys

from pipeline.errors import TrainingError
from pipeline.protocol.estimates import spread
from pipeline.protocol.events import AnyEvent, Metrics, Point
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_result import Spread
from pipeline.training.batches.order import SampleOrder
from pipeline.training.build import build
from pipeline.training.meters.clock import Clock, Lap
from pipeline.training.meters.meter import Meter
from pipeline.training.step.plain import Stepped

CPU = torch.device("cpu")


class Watch:
    """Stands in for the system's clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    monkeypatch.setattr("pipeline.training.meters.clock.time.perf_counter", watch)
    return watch


def lap(clock: Clock, watch: Watch, *, steps: int, seconds: float, samples: int = 0) -> Lap:
    watch.now += seconds
    timed = clock.lap(steps=steps, samples=samples)
    clock.count(timed)
    return timed


def test_a_lap_is_throughput_and_time_of_a_step(watch: Watch) -> None:
    clock = Clock(device=CPU, warmup_steps=0)
    clock.resume()
    timed = lap(clock, watch, steps=5, samples=640, seconds=2.0)
    assert (timed.samples_per_second, timed.step_ms) == (320.0, 400.0)
    assert clock.laps == clock.steady == [timed]


def test_warmup_does_not_count(watch: Watch) -> None:
    clock = Clock(device=CPU, warmup_steps=3)
    clock.resume()
    lap(clock, watch, steps=2, seconds=9.0)
    lap(clock, watch, steps=2, seconds=9.0)  # began within the warm-up
    steady = [lap(clock, watch, steps=2, seconds=1.0) for _ in range(2)]
    assert clock.laps == steady


def test_what_happens_in_a_pause_does_not_count(watch: Watch) -> None:
    clock = Clock(device=CPU, warmup_steps=0)
    clock.resume()
    lap(clock, watch, steps=1, seconds=1.0)
    watch.now += 50.0  # evaluation
    clock.resume()
    assert lap(clock, watch, steps=1, seconds=1.0).seconds == pytest.approx(1.0)


def test_short_laps_at_the_end_of_an_epoch_do_not_count(watch: Watch) -> None:
    clock = Clock(device=CPU, warmup_steps=0)
    clock.resume()
    for steps in (10, 1, 5, 10, 4):
        lap(clock, watch, steps=steps, seconds=1.0)
    assert [timed.steps for timed in clock.steady] == [10, 5, 10]


def test_training_within_its_warmup_has_its_last_lap(watch: Watch) -> None:
    clock = Clock(device=CPU, warmup_steps=100)
    clock.resume()
    lap(clock, watch, steps=2, seconds=9.0)
    last = lap(clock, watch, steps=2, seconds=1.0)
    assert clock.steady == [last]
    assert Clock(device=CPU, warmup_steps=0).steady == []


def test_the_spread_of_several_windows() -> None:
    assert spread([4.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=4.0, windows=3)
    assert spread([4.0, 1.0]).median == 2.5
    assert spread([7.0]) == Spread(median=7.0, low=7.0, high=7.0, windows=1)


# The meter

ORDER = SampleOrder(samples=10, global_batch_size=4, seed=3)


def meter(outbox: toys.Kept, *, rank: int = 0, max_steps: int | None = None) -> Meter:
    data = {"_target_": "toys.regression", "samples": ORDER.samples}
    trial = toys.trial(data=data, train={"global_batch_size": 4}, max_steps=max_steps)
    context = build(trial, rank=Rank(rank=rank))
    clock = Clock(device=CPU, warmup_steps=0)
    clock.resume()
    return Meter(context=context, clock=clock, outbox=outbox)


def add(to: Meter, *losses: float) -> None:
    for loss in losses:
        to.add(Stepped(torch.tensor(loss, dtype=torch.float64)), samples=4)


def test_each_step_is_reported_with_its_number(watch: Watch) -> None:
    outbox = toys.Kept()
    collecting = meter(outbox)
    add(collecting, 3.0, 2.0)
    watch.now += 4.0
    collecting.flush(step=2, epoch=1)
    add(collecting, 1.0)
    watch.now += 1.0
    collecting.flush(step=3, epoch=1)

    first, second = outbox.events
    assert isinstance(first, Metrics)
    assert isinstance(second, Metrics)
    assert first.points == (
        Point("train/loss", 1, 3.0), Point("train/learning_rate", 1, 0.05),
        Point("train/loss", 2, 2.0), Point("train/learning_rate", 2, 0.05),
        Point("throughput/samples_per_second", 2, 2.0), Point("time/step_ms", 2, 2000.0),
        Point("time/window_data_wait_ms", 2, 0.0),
    )  # fmt: skip
    assert [point.step for point in second.points] == [3, 3, 3, 3, 3]
    assert (first.step, first.epoch, second.step) == (2, 1, 3)
    assert (first.steps, first.losses, second.losses) == (2, (3.0, 2.0), (1.0,))
    assert collecting.latest["train/loss"] == 1.0


@pytest.mark.parametrize(("max_steps", "seconds"), [(None, 1.5), (20, 1.0)])
def test_reports_are_no_part_of_a_measurement(watch: Watch, max_steps: int | None, seconds: float) -> None:
    """Its windows are so short that what training hardly notices would be much of them."""

    class Slow(toys.Kept):
        def event(self, event: AnyEvent) -> None:
            watch.now += 0.5

    collecting = meter(Slow(), max_steps=max_steps)
    for step in range(1, 4):
        add(collecting, 1.0)
        watch.now += 1.0
        collecting.flush(step=step, epoch=1)

    assert [lap.seconds for lap in collecting.clock.laps[1:]] == [seconds, seconds]


def test_only_the_first_rank_reports(watch: Watch) -> None:
    outbox = toys.Kept()
    collecting = meter(outbox, rank=1)
    add(collecting, 3.0)
    watch.now += 1.0
    collecting.flush(step=1, epoch=1)
    assert not outbox.events
    assert collecting.latest["train/loss"] == 3.0  # all ranks return the same result


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_loss_that_is_no_number_stops_training(watch: Watch, bad: float) -> None:
    outbox = toys.Kept()
    collecting = meter(outbox)
    add(collecting, 1.0, bad, float("nan"))
    watch.now += 1.0
    with pytest.raises(TrainingError) as caught:
        collecting.flush(step=5, epoch=2)  # steps 3, 4, 5; an epoch has 3

    samples = ", ".join(map(str, ORDER.global_batch(1, 0)))
    assert str(caught.value).startswith(f"the loss is {bad} in step 4 (epoch 2); its global batch is samples {samples}")
    assert len(outbox.events) == 1
