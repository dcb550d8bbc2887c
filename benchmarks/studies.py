"""How often `pipeline compare` is right: simulated comparisons with a known difference between two variants.

    python benchmarks/studies.py    # two minutes; writes results/studies.md

For each law of the differences and each number of pairs it draws comparisons, and judges them as the command does.
Coverage is the share whose interval contains the true mean. A false alarm is a "better" or "worse" where the true mean
is 0. The power table has the pairs from which on 80% find a difference. The split of a time to target is drawn with
known factors, and each of its intervals is covered if it contains its factor.
"""

import argparse
import platform
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from measure import RESULTS

from pipeline.protocol.estimates import mean_of_independent
from pipeline.results.paired import Cost, judge, split

STUDIES, SEED = 2000, 17
PAIRS = (3, 4, 5, 6, 8, 10, 12, 15, 20)
EFFECTS = (0.5, 1.0, 2.0)
MOST, SHARE = 60, 0.8

Law = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""Draws differences of so many pairs around 0, with about the standard deviation 1."""


def normal(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Normal differences."""
    return source.standard_normal(size)


def heavy(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Student's t with 3 degrees of freedom: now and then a pair is far off."""
    return source.standard_t(3, size) / np.sqrt(3)


def counted(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Accuracies in steps of 1/360: a standard deviation is 1.5 samples."""
    return np.round(1.5 * source.standard_normal(size)) / 1.5


def diverged(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """A tenth of the trainings of either variant ends 10 standard deviations lower."""
    lost = [10 * (source.random(size) < 0.1) for _ in range(2)]
    return source.standard_normal(size) - lost[1] + lost[0]


def skewed(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Lognormal differences, less their mean: no interval of few pairs is right for them."""
    return (source.lognormal(0, 1, size) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


LAWS: dict[str, Law] = {
    "normal": normal,
    "Student's t, 3 degrees": heavy,
    "accuracies in steps of 1/360": counted,
    "10% diverged trainings": diverged,
    "lognormal (skewed)": skewed,
}
RATE, NEEDED, DEVICES = 1.8, 1.1, 2
"""Factors of the second variant: samples per second, samples until the target, devices."""


def main() -> None:
    """Simulate, and write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    source = np.random.default_rng(SEED)
    head = [
        "# How often compare is right",
        "",
        f"{STUDIES:,} simulated comparisons for each cell, seed {SEED}, NumPy {np.__version__}, Python "
        f"{platform.python_version()}. Written by `python benchmarks/studies.py`.",
    ]
    parts = [*head, "", "## Coverage of the 95% interval", "", _row("law", PAIRS), _line(len(PAIRS))]
    alarms = [
        "",
        "## False alarms: better or worse is said, but the true difference is 0",
        "",
        _row("law", PAIRS),
        _line(len(PAIRS)),
    ]
    for name, law in LAWS.items():
        found = [_study(law, source, size=size) for size in PAIRS]
        parts.append(_row(name, [f"{covered:.1%}" for covered, _ in found]))
        alarms.append(_row(name, [f"{alarm:.1%}" for _, alarm in found]))
    power = [
        "",
        f"## Pairs from which on {SHARE:.0%} of the comparisons find a difference",
        "",
        _row("law", [f"{effect} standard deviations" for effect in EFFECTS]),
        _line(len(EFFECTS)),
    ]
    power += [_row(name, [_needed(law, source, effect=effect) for effect in EFFECTS]) for name, law in LAWS.items()]
    factors = {"sooner": RATE / NEEDED, "samples/s": RATE, "samples": NEEDED, "device hours": DEVICES * NEEDED / RATE}
    parts_of_split = [
        "",
        "## Coverage of the split of a time to target",
        "",
        f"The second variant has {RATE} times the samples per second, needs {NEEDED} times the samples, and has "
        f"{DEVICES} times the devices. The luck of the samples has a standard deviation of 10% within a pair, that of "
        "the pace 3%.",
        "",
        _row("pairs", [f"{name}, {value:.3g}x" for name, value in factors.items()]),
        _line(len(factors)),
    ]
    parts_of_split += [_row(str(size), _cover_split(source, [*factors.values()], size=size)) for size in PAIRS]
    text = "\n".join([*parts, *alarms, *power, *parts_of_split])
    (RESULTS / "studies.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _study(law: Law, source: np.random.Generator, *, size: int, shift: float = 0.0) -> tuple[float, float]:
    """Return the shares of studies whose interval has the true mean, and whose answer is "better" or "worse"."""
    covered = told = 0
    for _ in range(STUDIES):
        differences = (law(source, size) + shift).tolist()
        found = mean_of_independent(differences)
        covered += found.low <= shift <= found.high
        told += judge(found, differences, direction="min", margin=None) in ("better", "worse")
    return covered / STUDIES, told / STUDIES


def _cover_split(source: np.random.Generator, factors: list[float], *, size: int) -> list[str]:
    """Return the share of splits whose intervals contain each of the true factors."""
    covered = np.zeros(len(factors))
    for _ in range(STUDIES):
        lucks = np.exp(source.normal(0, 0.3, size))
        samples = [1000 * lucks, 1000 * NEEDED * lucks * np.exp(source.normal(0, 0.1, size))]
        rates = [100 * pace * np.exp(source.normal(0, 0.03, size)) for pace in (1, RATE)]
        a, b = (
            [Cost(float(one / rate), float(one), devices) for one, rate in zip(own, paces, strict=True)]
            for own, paces, devices in zip(samples, rates, (1, DEVICES), strict=True)
        )
        found = split(dict(enumerate(zip(a, b, strict=True))), metric="m", target=0.97)
        estimates = (found.sooner, found.rate, found.samples, found.hours)
        covered += [
            one is not None and one.low <= factor <= one.high for one, factor in zip(estimates, factors, strict=True)
        ]
    return [f"{share:.1%}" for share in covered / STUDIES]


def _needed(law: Law, source: np.random.Generator, *, effect: float) -> str:
    for size in range(3, MOST + 1):
        if _study(law, source, size=size, shift=effect)[1] >= SHARE:
            return str(size)
    return f"over {MOST}"


def _row(name: str, cells: "list[str] | tuple[int, ...]") -> str:
    return f"| {' | '.join([name, *map(str, cells)])} |"


def _line(columns: int) -> str:
    return f"|---|{'--:|' * columns}"


if __name__ == "__main__":
    main()
