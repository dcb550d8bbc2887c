"""What counts as steady state, waiting for data, and reports: a few a second, on all ranks alike, with every loss."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import toys

from pipeline.protocol.events import LOSSES, AnyEvent, Metrics, Point
from pipeline.protocol.trial import Rank
from pipeline.record import loss_file
from pipeline.record.recorder import Recorder
from pipeline.train import meter
from pipeline.train.build import build
from pipeline.train.compilation import Stopwatch
from pipeline.train.gauges import Clock, DataWait, Lap
from pipeline.train.meter import Meter, iter_points
from pipeline.train.order import MicroBatch
from pipeline.train.state import Facts, Stepped

CPU = torch.device("cpu")
LONG = {"data": {"_target_": "toys.regression", "samples": 400}}  # 100 steps of 4 samples in an epoch


class Watch:
    """Stands in for the system's clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def lap(self, clock: Clock, *, steps: int, seconds: float = 1.0, samples: int = 0) -> Lap:
        self.now += seconds
        timed = clock.lap(steps=steps, samples=samples)
        clock.count(timed)
        return timed

    def stream(self, *waits_ms: float) -> Iterator[tuple[MicroBatch, float]]:
        for ms in waits_ms:
            self.now += ms / 1000
            yield MicroBatch(0, 0, [0], 1, is_last=True, global_size=1), ms


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr("pipeline.train.gauges.time.perf_counter", watch)
    return watch


def running(*, warmup_steps: int = 0) -> Clock:
    clock = Clock(CPU, warmup_steps=warmup_steps)
    clock.resume()
    return clock


def test_a_lap_is_throughput_and_time_of_a_step(watch: Watch) -> None:
    clock = running()
    timed = watch.lap(clock, steps=5, samples=640, seconds=2.0)
    assert (timed.samples_per_second, timed.step_ms) == (320.0, 400.0)
    assert clock.laps == clock.steady == [timed]


def test_neither_warmup_nor_pauses_count(watch: Watch) -> None:
    clock = running(warmup_steps=3)
    for _ in range(2):  # the second one began within the warm-up
        watch.lap(clock, steps=2, seconds=9.0)
    steady = [watch.lap(clock, steps=2)]
    watch.now += 50.0  # evaluation
    clock.resume()
    with clock.pause():
        watch.now += 50.0  # checks
    assert clock.laps == [*steady, watch.lap(clock, steps=2)]
    assert clock.laps[1].seconds == pytest.approx(1.0)


def test_short_laps_at_the_end_of_an_epoch_do_not_count_unless_there_are_no_others(watch: Watch) -> None:
    clock = running()
    for steps in (10, 1, 5, 10, 4):
        watch.lap(clock, steps=steps)
    assert [timed.steps for timed in clock.steady] == [10, 5, 10]

    within = running(warmup_steps=100)
    watch.lap(within, steps=2, seconds=9.0)
    last = watch.lap(within, steps=2)
    assert (within.steady, running().steady) == ([last], [])


def test_only_reading_is_waiting_and_a_step_has_all_its_micro_batches(watch: Watch) -> None:
    waits = DataWait(CPU)
    stream = waits.timed(watch.stream(5, 7, 0, 2))  # type: ignore[arg-type]
    batches = []
    for _ in range(2):
        for _ in range(2):
            batches.append(next(stream)[1])
            watch.now += 50.0  # computing
        waits.end_step()
    assert batches == [5, 7, 0, 2]
    assert waits.take() == pytest.approx([12, 2])
    assert (waits.take(), list(stream)) == ([], [])


def test_the_clock_leaves_out_what_a_compiler_has_disturbed() -> None:
    stopwatch = Stopwatch()
    clock = Clock(CPU, warmup_steps=0, compiling=stopwatch)
    stopwatch.seconds = 1.5  # before the lap, in an evaluation, say
    clock.resume()
    told = []
    for seconds in (0.0, 1.5, 0.0):
        stopwatch.seconds += seconds
        told.append(clock.has_compiled)
        clock.count(clock.lap(steps=1, samples=8), is_disturbed=clock.has_compiled)
    assert told == [False, True, False]
    assert len(clock.laps) == len(clock.steady) == 2


# The meter


def metered(outbox: toys.Kept, *, samples: int = 10, max_steps: int | None = None) -> Meter:
    """The meter of a training that has been built, with batches of 4 samples."""
    data = {"_target_": "toys.regression", "samples": samples}
    trial = toys.trial(data=data, train={"global_batch_size": 4}, max_steps=max_steps)
    s = build(trial, rank=Rank(), outbox=outbox)
    s.facts = Facts(draws=False, draws_others=False, items_per_sample=1.0, gathers=False, log_names=())
    s.meter = Meter(s)
    s.meter.resume()
    return s.meter


def add(to: Meter, *losses: float) -> None:
    """Take steps of 4 samples with these mean losses."""
    for loss in losses:
        to._s.step += 1
        to.add(Stepped({"loss": torch.tensor(4 * loss).double()}, None, {}, {"learning_rate": 0.05}))


@pytest.mark.parametrize(
    ("max_steps", "step_ms", "expected"),
    [
        (None, 1000.0, [*range(1, 201)]),
        (None, 60.0, [*range(1, 100, 5), *range(100, 201, 5)]),
        (None, 10.1, [1, 33, 65, 97, 100, 132, 164, 196, 200]),
        (None, 0.5, [1, 100, 200]),  # the end of the epoch comes first
        (90, 0.001, [*range(3, 90, 5), 90]),  # a measurement has its windows, after three steps to warm up
    ],
)
def test_the_first_step_is_reported_then_by_time_and_at_the_end_of_an_epoch(
    watch: Watch, max_steps: int | None, step_ms: float, expected: list[int]
) -> None:
    collecting, found = metered(toys.Kept(), samples=400, max_steps=max_steps), []
    for step in range(1, (max_steps or 200) + 1):
        add(collecting, 1.0)
        watch.now += step_ms / 1000
        if collecting.is_due(step):
            collecting.flush()
            found.append(step)
    assert found == expected


def test_each_step_is_reported_with_its_number(watch: Watch) -> None:
    outbox = toys.Kept()
    collecting = metered(outbox)
    add(collecting, 3.0, 2.0)
    watch.now += 4.0
    collecting.flush()
    add(collecting, 1.0)
    watch.now += 1.0
    collecting.flush()

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
    assert (first.steps, first.losses, second.losses) == (2, (3.0, 2.0), (2.0,))  # 2 samples are left, with 4 in sum
    assert (collecting.latest["train/loss"], collecting.trained_s) == (2.0, 5.0)


@pytest.mark.parametrize(("max_steps", "seconds"), [(None, 1.5), (20, 1.0)])
def test_reports_are_no_part_of_a_measurement(watch: Watch, max_steps: int | None, seconds: float) -> None:
    """Its windows are so short that what training hardly notices would be much of them."""

    class Slow(toys.Kept):
        def event(self, event: AnyEvent) -> None:
            watch.now += 0.5

    collecting = metered(Slow(), max_steps=max_steps)
    for _ in range(6):
        add(collecting, 1.0)
        watch.now += 1.0
        collecting.flush()
    assert [lap.seconds for lap in collecting.clock.laps[1:]] == pytest.approx([seconds] * 2)


# Points


def test_a_point_is_a_mean_with_its_range_and_the_last_learning_rate() -> None:
    columns = {
        "loss": {1: 1.0, 2: 5.0, 3: 3.0}, "learning_rate": {1: 0.3, 2: 0.2, 3: 0.1},
        "accuracy": {1: 0.5, 2: 1.0, 3: 0.0}, "gradient_norm_critic": {2: 4.0},
    }  # fmt: skip
    assert list(iter_points(columns, [range(1, 4)], skipped=())) == [
        Point("train/loss", 3, 3.0), Point("train/loss_min", 3, 1.0), Point("train/loss_max", 3, 5.0),
        Point("train/learning_rate", 3, 0.1), Point("train/accuracy", 3, 0.5),
        Point("train/gradient_norm_critic", 3, 4.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "skipped", "value"), [((1, 2, 3), [2], 2.0), ((1, 2, 3), [], math.nan), ((2,), [2], math.nan)]
)
def test_a_skipped_step_is_in_no_mean_but_a_point_of_its_own_shows_it(
    steps: tuple[int, ...], skipped: list[int], value: float
) -> None:
    columns = {"loss": {1: 1.0, 2: math.nan, 3: 3.0}}
    point, *_ = iter_points(columns, [range(steps[0], steps[-1] + 1)], skipped=skipped)
    assert point.value == pytest.approx(value, nan_ok=True)


def reported(patch: pytest.MonkeyPatch, report_ms: float, every: int | str) -> tuple[toys.Kept, list[float]]:
    """A training of 200 steps, and the losses of all of its reports."""
    patch.setattr(meter, "REPORT_MS", report_ms)
    _, outbox = toys.trained(**LONG, train={"global_batch_size": 4, "log_every_steps": every})
    losses = [loss for event in outbox.events if isinstance(event, Metrics) for loss in event.losses]
    assert len(losses) == 200
    return outbox, losses


def test_every_loss_is_reported_once_however_steps_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    single, expected = reported(monkeypatch, 0.0, 1)
    together, losses = reported(monkeypatch, 1e9, 1)
    for outbox in (single, together):
        assert [point.step for point in outbox.points("train/loss")] == list(range(1, 201))
        assert outbox.series("train/loss") == losses == expected
    steps = [[one.step for one in outbox.events if isinstance(one, Metrics)] for outbox in (single, together)]
    assert list(dict.fromkeys(steps[0])) == list(range(1, 201))
    assert list(dict.fromkeys(steps[1])) == [1, 100, 200]


def test_short_steps_have_a_few_points_and_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of 2,000 steps a second sends no more points than one of 20."""
    outbox, losses = reported(monkeypatch, 1e9, "auto")
    assert [point.step for point in outbox.points("train/loss")] == [1, 100, 200]
    assert outbox.series("train/loss")[2] == pytest.approx(np.mean(losses[100:]))
    assert outbox.series("train/loss_max")[1] == max(losses[100:])
    by_number = [point.step for point in reported(monkeypatch, 330.0, 40)[0].points("train/loss")]
    assert set(range(40, 201, 40)) <= set(by_number)


def test_losses_are_kept_at_the_places_of_their_steps(tmp_path: Path) -> None:
    assert loss_file.read(tmp_path) == ()
    loss_file.write(tmp_path, [1.0, 2.0, 3.0], first=1)
    loss_file.write(tmp_path, [6.0], first=6)
    loss_file.write(tmp_path, [2.5], first=2)  # again, after a resume
    kept = np.load(tmp_path / LOSSES)
    assert kept.dtype == np.float64
    assert kept.tolist() == pytest.approx([1.0, 2.5, 3.0, math.nan, math.nan, 6.0], nan_ok=True)
    assert str(loss_file.read(tmp_path)) == str(tuple(kept.tolist()))


def test_the_recorder_keeps_losses_in_their_file_and_not_in_the_journal(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, subscribers=[])
    report = Metrics(step=3, epoch=1, points=(Point("train/loss", 3, 2.0),), steps=3, losses=(1.0, 2.0, 3.0))
    recorder.receive(report)
    recorder.receive(report)  # of a resumed training
    recorder.close()
    assert loss_file.read(tmp_path) == (1.0, 2.0, 3.0)
    *_, line = (tmp_path / "events.jsonl").read_text().splitlines()
    assert '"losses":[1' not in line
    assert '"steps":3' in line
