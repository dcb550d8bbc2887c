"""Time to target counts training steps only, is compared in pairs, and is split into the pace and the samples."""

# promise: `compare --target` splits how much sooner a target is reached into samples per second and samples

import math
import random
from collections.abc import Iterator

import pytest

from pipeline.protocol.events import AnyEvent, Metrics, Point, Started
from pipeline.results.paired import Cost, Way, find_target, read_way, split

METRIC = "validation/accuracy"


def events(values: list[float], *, step_s: float = 1.0, again: int = 0) -> Iterator[AnyEvent]:
    """A training of ten steps before each evaluation; steps from the ``again``th evaluation on are done twice."""
    yield Started(total_steps=100, steps_per_epoch=10, epochs=1, train_samples=95, epoch_samples=95,
                  validation_samples=1, parameters=1, devices=(), data_name="d", data_digest="d")  # fmt: skip
    for number, value in [*enumerate(values, 1), *[*enumerate(values, 1)][again or len(values) :]]:
        for half in (1, 2):
            step = 10 * number - 10 + 5 * half
            yield Metrics(step=step, epoch=1, steps=5, points=(Point("time/step_ms", step, 1000 * step_s),))
        yield Metrics(step=10 * number, epoch=1, points=(Point(METRIC, 10 * number, value),))


def way(values: list[float], **more: float) -> Way:
    return read_way(events(values, **more), METRIC, batch=8, devices=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "target", "steps"),
    [
        ([0.5, 0.7, 0.9], 0.8, 25.0),  # half way between the second and the third evaluation
        ([0.5, 0.7, 0.9], 0.7, 20.0),
        ([0.5, 0.7, 0.9], 0.3, 10.0),  # reached before the first evaluation: nothing to interpolate
        ([0.5, 0.9, 0.1], 0.7, 15.0),  # the first time counts
        ([0.5, math.nan, 0.9], 0.7, 20.0),
        ([0.5, 0.6], 0.7, None),
        ([], 0.7, None),
    ],
)
def test_what_the_target_took(values: list[float], target: float, steps: float | None) -> None:
    found = way(values, step_s=2.0).find_cost(target, "max")
    assert found == (Cost(pytest.approx(2 * steps), pytest.approx(9.5 * steps), 1) if steps else None)


def test_a_loss_falls_to_its_target_and_steps_that_are_done_again_count_once() -> None:
    assert way([3, 1]).find_cost(2, "min") == Cost(15, 142.5, 1)
    assert way([0.5, 0.7, 0.9], again=1).find_cost(0.9, "max") == way([0.5, 0.7, 0.9]).find_cost(0.9, "max")


def test_the_default_target_is_the_worst_of_the_best() -> None:
    ways = [way([0.5, 0.9, 0.8]), way([0.4, 0.7]), way([])]
    assert (find_target(ways, "max"), find_target(ways, "min"), find_target([way([])], "max")) == (0.7, 0.5, None)


def pairs(source: random.Random, count: int) -> dict[int, tuple[Cost | None, Cost | None]]:
    """Pairs whose true factors are 1.8 times the samples per second and 1.1 times the samples, on twice the devices."""
    found: dict[int, tuple[Cost | None, Cost | None]] = {}
    for seed in range(count):
        luck, rates = math.exp(source.gauss(0, 0.3)), [math.exp(source.gauss(0, 0.03)) for _ in "AB"]
        samples = [1000 * luck, 1100 * luck * math.exp(source.gauss(0, 0.1))]
        found[seed] = (
            Cost(samples[0] / (100 * rates[0]), samples[0], 1),
            Cost(samples[1] / (180 * rates[1]), samples[1], 2),
        )
    return found


def test_the_split_finds_its_true_factors() -> None:
    source, covered = random.Random(17), dict.fromkeys(("sooner", "rate", "samples", "hours"), 0)
    true = {"sooner": 1.8 / 1.1, "rate": 1.8, "samples": 1.1, "hours": 2 * 1.1 / 1.8}
    for _ in range(400):
        found = split(pairs(source, 5), metric=METRIC, target=0.97)
        for name, value in true.items():
            covered[name] += getattr(found, name).low <= value <= getattr(found, name).high
        assert found.sooner is not None and found.rate is not None and found.samples is not None  # noqa: PT018
        assert found.sooner.value == pytest.approx(found.rate.value / found.samples.value)
    assert all(370 <= count <= 394 for count in covered.values()), covered


def test_the_split_in_words() -> None:
    costs = {seed: (Cost(100.0 + seed, 1000.0, 1), Cost(61.0 + 2 * seed, 1100.0, 2)) for seed in range(4)}
    found = split(costs, metric="m", target=0.97)
    assert [*found.format("A", "B")] == [
        "B reaches m 0.97 1.59x sooner than A (95% CI 1.52 to 1.66): 1.75x (95% CI 1.67 to 1.82) the samples per "
        "second, 1.10x (95% CI 1.10 to 1.10) the samples; 26% more device hours (95% CI 21% to 32% more)"
    ]
    back = split({seed: both[::-1] for seed, both in costs.items()}, metric="m", target=0.97)
    assert " later " in next(back.format("B", "A"))
    assert [fact.key for fact in found.facts("_C")][:2] == ["target_sooner_C", "target_rate_C"]


def test_what_does_not_reach_the_target_is_named_and_is_no_answer() -> None:
    found = split({3: (Cost(50, 9, 1), Cost(100, 9, 1)), 4: (None, Cost(90, 9, 1))}, metric="m", target=0.97)
    assert found.state == "inconclusive"
    missed, said, why = found.format("A", "B")
    assert missed == "m 0.97 was not reached by A with seed 4"
    assert said.startswith("Inconclusive whether B reaches m 0.97 sooner than A, 1 pair: 2.00x later, ")
    assert why.startswith("The time is that of the 1 of 2 pairs")
    nothing = split({3: (None, None)}, metric="m", target=1)
    assert [*nothing.format("A", "B")] == ["m 1 was not reached by A with seed 3, B with seed 3"]
    assert [*nothing.facts()] == []
