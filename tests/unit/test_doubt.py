"""The interval of a prediction: the noise of its inputs, carried through the model, and what it leaves out."""

import math
import random
from typing import Any

import pytest

from pipeline.protocol import estimates
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Gradient, Link, Spread, StepParts, TrialResult
from pipeline.report.doubt import Setting, doubts, interval
from pipeline.report.forecast import Check, Forecast
from pipeline.report.link import fit, latency_ms, transfer_ms
from pipeline.report.scaling import at_pace, predict
from pipeline.report.simulation import Workload

LINK = Link(latency_us=50, bandwidth_gbit=2)
SIZES = (4, 16, 64)
ROUNDS = 9


def noisy(value: float, source: random.Random, *, noise: float, count: int = ROUNDS) -> tuple[float, ...]:
    return tuple(value * math.exp(source.gauss(0, noise)) for _ in range(count))


def middle(values: tuple[float, ...]) -> float:
    return estimates.spread(values).median


def costs(source: random.Random, *, noise: float, workers: int = 1, slowdown: float = 1.0) -> Costs:
    """Costs of a worker that takes 1 ms and 0.5 ms for each sample, the backward pass two thirds of it."""
    curve = []
    for size in SIZES:
        rounds = noisy(slowdown * (1 + 0.5 * size), source, noise=noise)
        ms = middle(rounds)
        curve.append(BatchCost(samples=size, forward_ms=ms / 3, backward_ms=2 * ms / 3, data_ms=0.0, rounds_ms=rounds))
    exchanges = []
    for size in (2**12, 2**16, 2**20, 2**24):
        exact = latency_ms(LINK, workers=workers, backend="gloo") + transfer_ms(LINK, size, workers=workers)
        rounds = noisy(exact, source, noise=noise) if workers > 1 else ()
        exchanges += [AllReduce(bytes=size, ms=middle(rounds), rounds_ms=rounds)] if rounds else []
    return Costs(
        curve=tuple(curve), optimizer_ms=0.2, gradients=(Gradient(bytes=8_000_000, ready=0.6),),
        all_reduces=tuple(exchanges), world_size=workers,
    )  # fmt: skip


def result(of: Costs, source: random.Random, *, noise: float) -> TrialResult:
    steps = noisy(33.2, source, noise=noise, count=5)
    rate = Spread(median=1, low=1, high=1, windows=5)
    return TrialResult(
        trial="alone", steps=25, samples_per_second=rate, step_ms=estimates.spread(steps, keeps_values=True),
        parts=StepParts(data_wait_ms=0.0, nodes=("node-1",)), peak_memory_mb=(), gradient_mb=8.0, costs=of,
    )  # fmt: skip


def measured(seed: int, *, noise: float) -> tuple[Setting, TrialResult, TrialResult]:
    """What `pipeline predict` has after its measurements, on a machine where two workers slow each other by 20%."""
    source = random.Random(seed)
    alone, beside = costs(source, noise=noise), costs(source, noise=noise, workers=2, slowdown=1.2)
    one, two = result(alone, source, noise=noise), result(beside, source, noise=noise)
    ratios = [
        (own.forward_ms + own.backward_ms) / (base.forward_ms + base.backward_ms)
        for own, base in zip(beside.curve, alone.curve, strict=True)
    ]
    workload = Workload(costs=alone, global_batch_size=64, slowdown=max(1.0, middle(tuple(ratios))))
    link = fit(beside.all_reduces, workers=2, backend="gloo")
    return Setting(at_pace(workload, step_ms=one.step_ms.median), link), one, two


def speedup(at: Setting) -> float:
    return predict(at.workload, at.link, workers=8).speedup


def test_the_interval_of_a_prediction_holds_what_it_would_be_without_noise() -> None:
    exact = speedup(measured(0, noise=0.0)[0])
    held = 0
    for seed in range(60):
        setting, *results = measured(seed, noise=0.05)
        low, high = interval(speedup, setting, doubts(setting, *results, confidence=0.95))
        held += low <= exact <= high
        assert high / low < 2, "an interval that holds everything says nothing"
    assert held >= 54


def test_without_noise_there_is_no_interval_to_speak_of() -> None:
    setting, *results = measured(0, noise=0.0)
    low, high = interval(speedup, setting, doubts(setting, *results, confidence=0.95))
    assert (low, high) == pytest.approx((speedup(setting), speedup(setting)))


def test_each_input_has_a_doubt_of_its_own_and_all_of_them_widen_the_interval() -> None:
    setting, *results = measured(1, noise=0.05)
    all_of_them = doubts(setting, *results, confidence=0.95)
    assert [each.input for each in all_of_them] == ["the step", "small batches", "contention", "the link"]
    low, high = interval(speedup, setting, all_of_them)
    for each in all_of_them:
        inner = interval(speedup, setting, [each])
        assert low <= inner[0] <= speedup(setting) <= inner[1] <= high


def test_a_given_link_is_not_doubted_and_one_measurement_says_nothing_of_noise() -> None:
    setting, alone, _ = measured(1, noise=0.05)
    assert [each.input for each in doubts(setting, alone, confidence=0.95)] == ["the step", "small batches"]
    once = alone.model_copy(update={"step_ms": Spread(median=33, low=33, high=33, windows=1), "costs": None})
    bare = [cost.model_copy(update={"rounds_ms": ()}) for cost in setting.workload.costs.curve]
    plain = setting.workload.costs.model_copy(update={"curve": tuple(bare)})
    old = Setting(setting.workload.model_copy(update={"costs": plain}), setting.link)
    assert doubts(old, once, confidence=0.95) == ()


def test_one_worker_is_its_own_baseline_and_has_no_interval() -> None:
    setting, *results = measured(2, noise=0.1)
    among = doubts(setting, *results, confidence=0.95)

    def alone(at: Setting) -> float:
        return predict(at.workload, at.link, workers=1).speedup

    assert interval(alone, setting, among) == pytest.approx((1, 1))


# Two series that were measured one after the other


def test_a_quotient_has_the_noise_of_both_series() -> None:
    own, base = (1.9, 2.0, 2.1, 2.0), (1.0, 1.02, 0.98, 1.0)
    found = estimates.quotient(own, base)
    assert found.value == pytest.approx(2, rel=0.01)
    for one, other in ((own, (1.0,) * 4), ((2.0,) * 4, base)):
        part = estimates.quotient(one, other)
        assert found.low < part.low < part.high < found.high
    inverse = estimates.quotient(base, own)
    assert (1 / inverse.value, 1 / inverse.high, 1 / inverse.low) == pytest.approx(found[:3])


def test_a_quotient_of_single_values_may_be_anything() -> None:
    found = estimates.quotient([2.0, 2.1], [1.0])
    assert (found.low, found.high, found.size) == (0.0, math.inf, 1)


# In words


def forecast(check: Check | None = None, *, noise: float) -> Forecast:
    setting, *results = measured(3, noise=noise)
    among = doubts(setting, *results, confidence=0.95) if noise else ()
    facts: dict[str, Any] = {"name": "lab", "hardware": "2 cores", "compute_ms_per_sample": 0.5, "check": check}
    return Forecast.of(
        setting, workers=8, scalings=("strong", "weak"), doubts=among, link_from="measured", measured_workers=2, **facts
    )


def test_the_table_shows_the_interval_of_each_speedup_but_the_baseline() -> None:
    found = forecast(noise=0.03)
    one, two, *_ = found.tables[0].rows
    assert one[4] == "1.00x"
    second = found.outlooks[0].predictions[1]
    assert two[4] == f"{second.speedup:.2f}x ({second.speedup_low:.2f}-{second.speedup_high:.2f})"
    (told,) = found.blocks
    assert "Intervals (95%) contain the noise with which the step, small batches, contention and the link" in told[-1]
    assert "don't contain what the model leaves out" in told[-1]


def test_a_wide_interval_replaces_the_figure_and_an_unknown_one_is_left_out() -> None:
    wide = forecast(noise=0.4).outlooks[0].predictions[-1]
    assert forecast(noise=0.4).tables[0].rows[-1][4] == f"{wide.speedup_low:.2f}x to {wide.speedup_high:.2f}x"
    plain = forecast(noise=0.0)
    assert plain.tables[0].rows[-1][4] == f"{plain.outlooks[0].predictions[-1].speedup:.2f}x"
    assert not any("contain" in line for block in plain.blocks for line in block)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (
            Check(workers=2, measured=1.6, measured_low=1.5, measured_high=1.7, predicted=1.7, predicted_low=1.65,
                  predicted_high=1.75),
            "Checked with 2 workers: 1.60x (1.50-1.70) measured, 1.70x (1.65-1.75) predicted; the difference of +6% is "
            "within the noise of both (95% intervals).",
        ),
        (
            Check(workers=2, measured=1.6, measured_low=1.55, measured_high=1.65, predicted=1.8, predicted_low=1.75,
                  predicted_high=1.85),
            "Checked with 2 workers: 1.60x (1.55-1.65) measured, 1.80x (1.75-1.85) predicted; the difference of +12% "
            "is beyond the noise: the model is wrong here by that much (95% intervals).",
        ),
        (Check(workers=2, measured=1.6, predicted=1.8),
         "Checked with 2 workers: 1.60x measured, 1.80x predicted (+12%)."),
    ],
)  # fmt: skip
def test_the_check_says_whether_noise_explains_the_difference(check: Check, said: str) -> None:
    assert forecast(check, noise=0.0).blocks[0][0] == said


def test_a_forecast_with_intervals_survives_json() -> None:
    found = forecast(noise=0.05)
    assert Forecast.model_validate_json(found.model_dump_json()) == found
