"""How often `pipeline compare` is right: simulated studies with a known difference between two variants.

    python benchmarks/studies.py    # three minutes; writes results/studies.md

For each law of the differences and each number of pairs it draws studies, and judges them as the command does. Coverage
is the share of studies whose interval contains the true mean. A false alarm is a "better" or "worse" where the true
mean is 0. The power table has the pairs from which on 80% of the studies find a difference. A study until its answer is
clear covers the truth if the intervals of all its looks do.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.protocol.estimates import mean_of_independent
from pipeline.report.numbers.looks import confidence_of_look, plan_looks
from pipeline.results.paired import judge

RESULTS = Path(__file__).parent / "results" / "studies.md"
STUDIES, SEED = 2000, 17
PAIRS = (3, 4, 5, 6, 8, 10, 12, 15, 20)
EFFECTS = (0.5, 1.0, 2.0)
MOST, SHARE = 60, 0.8
SAMPLES = 360
"""Samples of a validation set, of which an accuracy counts the right ones."""

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


def real(name: str) -> Law:
    """Return the law of differences of real trainings: the loss of two different seeds, half of all studies' luck."""
    known = json.loads(RESULTS.with_name("real_studies.json").read_text(encoding="utf-8"))["values"][name]
    losses = np.array(list(known["A"]["validation/loss"].values()))

    def draw(source: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        drawn = np.array([source.choice(losses, 2, replace=False) for _ in range(size)])
        differences: npt.NDArray[np.float64] = (drawn[:, 1] - drawn[:, 0]) / (np.sqrt(2) * losses.std())
        return differences

    return draw


LAWS: dict[str, Law] = {
    "normal": normal,
    "Student's t, 3 degrees": heavy,
    "accuracies in steps of 1/360": counted,
    "10% diverged trainings": diverged,
    **{f"60 trainings of {name}": real(name) for name in ("tabular", "resnet", "gpt")},
    "lognormal (skewed)": skewed,
}
LOOKS = plan_looks(5, at_most=20)


def main() -> None:
    """Simulate, and write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    source = np.random.default_rng(SEED)
    head = [
        "# How often compare is right",
        "",
        f"{STUDIES:,} simulated studies for each cell, seed {SEED}, NumPy {np.__version__}, Python "
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
        f"## Pairs from which on {SHARE:.0%} of the studies find a difference",
        "",
        _row("law", [f"{effect} standard deviations" for effect in EFFECTS]),
        _line(len(EFFECTS)),
    ]
    power += [_row(name, [_needed(law, source, effect=effect) for effect in EFFECTS]) for name, law in LAWS.items()]
    clear = [
        "",
        f"## Until the answer is clear: looks after {', '.join(map(str, LOOKS))} pairs",
        "",
        "Each cell of a difference: the share of studies that find it, and the mean number of pairs that they train.",
        "",
        _row("law", ["all intervals right", "false alarms", *(f"{effect} standard deviations" for effect in EFFECTS)]),
        _line(2 + len(EFFECTS)),
    ]
    clear += [_row(name, _until_clear(law, source)) for name, law in LAWS.items()]
    RESULTS.write_text("\n".join([*parts, *alarms, *power, *clear]) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


def _study(law: Law, source: np.random.Generator, *, size: int, shift: float = 0.0) -> tuple[float, float]:
    """Return the shares of studies whose interval has the true mean, and whose answer is "better" or "worse"."""
    covered = told = 0
    for _ in range(STUDIES):
        differences = (law(source, size) + shift).tolist()
        found = mean_of_independent(differences)
        covered += found.low <= shift <= found.high
        told += judge(found, differences, direction="min", margin=None) in ("better", "worse")
    return covered / STUDIES, told / STUDIES


def _until_clear(law: Law, source: np.random.Generator) -> list[str]:
    """Return shares of studies that are looked at until they are clear, see `main`."""
    level = confidence_of_look([len(LOOKS)], index=0)
    cells = []
    for effect in (0.0, *EFFECTS):
        covered = told = trained = 0
        for _ in range(STUDIES):
            differences = (law(source, LOOKS[-1]) + effect).tolist()
            found = {size: mean_of_independent(differences[:size], confidence=level) for size in LOOKS}
            covered += all(one.low <= effect <= one.high for one in found.values())
            verdicts = {
                size: judge(one, differences[:size], direction="min", margin=None, confidence=level)
                for size, one in found.items()
            }
            ended = next((size for size, verdict in verdicts.items() if verdict != "inconclusive"), None)
            told += ended is not None
            trained += ended or LOOKS[-1]
        share = f"{told / STUDIES:.1%}"
        cells += [f"{share}, {trained / STUDIES:.1f}"] if effect else [f"{covered / STUDIES:.1%}", share]
    return cells


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
