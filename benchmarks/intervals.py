"""Coverage of the speedup's interval: the shipped schedule and estimator on a simulated machine that others use, too.

    python benchmarks/intervals.py [--seed 1] [--repeats 400]     # ten minutes; writes results/intervals.md

The logarithm of a step's time is that of its trial plus noise that all trials share (a slow drift, bursts of about a
second), noise of the trial itself over seconds, and white noise with a heavy tail. The levels were measured on shared
machines with two cores.
"""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from measure import RESULTS, table
from scipy.signal import lfilter

from pipeline.experiment.schema import Benchmark
from pipeline.protocol.estimates import Estimate, ratio
from pipeline.train.turns import Schedule, turns

GRID_S = 0.02
"""Resolution of the noise that is correlated in time."""
LONGEST_S = 120.0


class Level(NamedTuple):
    """Standard deviations of the noise on the logarithm of a step's time."""

    drift: float
    burst: float
    own: float
    white: float
    tail: float
    """Share of steps that are hit by an exponential delay of 40% on average."""


LEVELS = {
    "quiet": Level(0.02, 0.03, 0.01, 0.03, 0.01),
    "usual": Level(0.08, 0.12, 0.04, 0.08, 0.03),
    "busy": Level(0.30, 0.30, 0.10, 0.15, 0.06),
}
STEP_S = (0.02, 0.1, 0.35)
"""Seconds of a step of the baseline."""
SPEEDUPS = (1.0, 1.1, 1.7, 3.5)


class Machine:
    """A machine with trials that take steps, and a clock."""

    def __init__(self, level: Level, names: tuple[str, ...], *, random: np.random.Generator) -> None:
        self._level, self._random, self._now = level, random, 0.0
        shared = self._wandering(60.0, level.drift) + self._wandering(1.0, level.burst)
        self._noise = {name: shared + self._wandering(5.0, level.own) for name in names}

    def take(self, name: str, step_s: float, *, steps: int) -> float:
        """Take steps and return their seconds."""
        begin = self._now
        for _ in range(steps):
            noise = self._noise[name][min(int(self._now / GRID_S), len(self._noise[name]) - 1)]
            noise += self._random.normal(0, self._level.white)
            if self._random.random() < self._level.tail:
                noise += self._random.exponential(0.4)
            self._now += step_s * math.exp(noise)
        return self._now - begin

    def _wandering(self, seconds: float, deviation: float) -> np.ndarray:
        """Return an Ornstein-Uhlenbeck process with that correlation time on the grid."""
        decay = math.exp(-GRID_S / seconds)
        shocks = self._random.normal(size=int(LONGEST_S / GRID_S)) * deviation * math.sqrt(1 - decay**2)
        shocks[0] = self._random.normal() * deviation
        return np.asarray(lfilter([1.0], [1.0, -decay], shocks))


def measured(level: Level, step_s: dict[str, float], *, measure: Benchmark, random: np.random.Generator) -> Estimate:
    """Measure the speedup of the last trial over the first as a run does."""
    machine, names = Machine(level, tuple(step_s), random=random), list(step_s)
    schedule = Schedule.within(step_s, budget_s=measure.time_budget_s, most=measure.rounds, queue=0)
    pairs = []
    for order in turns(names, rounds=schedule.rounds, seed=int(random.integers(100))):
        rates = {}
        for name in order:
            machine.take(name, step_s[name], steps=1)
            rates[name] = schedule.steps[name] / machine.take(name, step_s[name], steps=schedule.steps[name])
        pairs.append((rates[names[-1]], rates[names[0]]))
    return ratio(pairs, confidence=measure.confidence_level)


def rows(*, seed: int, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each machine, step and speedup."""
    random, measure = np.random.default_rng(seed), Benchmark()
    for name, level in LEVELS.items():
        for base_s in STEP_S:
            for truth in SPEEDUPS:
                step_s = {"single": base_s, "reference": base_s / 1.4, "ddp": base_s / truth}
                found = [measured(level, step_s, measure=measure, random=random) for _ in range(repeats)]
                covered = np.mean([one.low <= truth <= one.high for one in found])
                claims = np.mean([not one.low <= 1 <= one.high for one in found])
                half = [(one.high - one.low) / 2 / one.value for one in found]
                rounds = Schedule.within(step_s, budget_s=measure.time_budget_s, most=measure.rounds, queue=0).rounds
                yield (
                    name, f"{1000 * base_s:.0f}", f"{truth}", f"{rounds}", f"{covered:.1%}",
                    f"{claims:.1%}", f"{np.median(half):.1%}", f"{np.quantile(half, 0.9):.1%}",
                )  # fmt: skip


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=400)
    arguments = parser.parse_args()
    head = ["machine", "step, ms", "true speedup", "pairs", "coverage", "claims a speedup", "half-width", "90% of"]
    found = table(head, list(rows(seed=arguments.seed, repeats=arguments.repeats)))
    text = f"Seed {arguments.seed}, {arguments.repeats} measurements for each row.\n\n{found}"
    (RESULTS / "intervals.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
