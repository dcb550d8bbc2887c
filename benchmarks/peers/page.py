"""The figures of `__main__` as Markdown."""

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import NamedTuple

from competitors import REFERENCE, TRACKED
from pydantic import BaseModel
from race import Run

from pipeline.protocol import estimates
from pipeline.protocol.estimates import Estimate

_TOLERANCE = 0.01
"""Of losses, relative to the first one: rounding, which training amplifies."""

_EQUAL = 0.05
"""Distance from 1 up to which an interval that contains 1 means equal; a wider one resolves nothing."""

EXPLANATION = """\
Each row does the same steps on the same batches from the same weights, one thread for each worker. samples/s: median
over the epochs of all rounds but each run's first epoch, and the lowest and highest of them. x bare: ratio to the loop
written by hand with as many workers, taken within each round, with its 95% interval; ahead or behind if that excludes
1, equal if it contains 1 and nothing beyond 5% of it, else not resolved. First step: from the start of the command to
the end of the first optimizer step. Prompt: from the start of the command to its end. MB: of the largest worker, and of
all processes of the run together, resident (RSS, where shared pages count once for each) and proportional (PSS, where
they count once). How it is measured, and what is fair about it: `benchmarks/README.md`.
"""


class Results(BaseModel):
    """All that was measured."""

    machine: str
    versions: dict[str, str]
    rounds: int
    busy: list[float]
    """Part of the cores that other processes took just before each round."""
    taken: int = 0
    """Processes that computed beside each run, to measure on a machine that isn't idle."""
    runs: list[Run]


class Line(NamedTuple):
    """A row of a table."""

    runs: list[Run]
    reference: list[Run]

    @property
    def samples_per_second(self) -> list[float]:
        """Of all windows of all rounds."""
        return [value for run in self.runs for value in run.samples_per_second]

    @property
    def ratio(self) -> Estimate | None:
        """Ratio of throughputs to the reference, from the rounds that have both."""
        return ratio(self.runs, self.reference)

    @property
    def is_reference(self) -> bool:
        """True if it is compared with itself."""
        return self.runs == self.reference

    def ends(self) -> Iterator[str]:
        """Yield cells on start, prompt and memory: the figure, its ratio to the reference, and the verdict."""
        figures: list[tuple[Figure, str]] = [
            (lambda run: run.first_step_s, ".1f"),
            (lambda run: run.prompt_s, ".1f"),
            (lambda run: run.all_peak_pss_mb, ",.0f"),
        ]
        for figure, style in figures:
            values = [value for run in self.runs if (value := figure(run)) is not None]
            compared = None if self.is_reference else ratio(self.runs, self.reference, figure)
            yield _spread(values, style) if values else "-"
            yield f"{_told(compared)} {verdict(compared, is_less_better=True)}" if compared else "-"

    @property
    def trains_the_same(self) -> bool:
        """Whether all losses that were kept are those of the reference."""
        first = self.reference[0].losses
        bound = _TOLERANCE * first[0]
        return all(abs(a - b) <= bound for run in self.runs for a, b in zip(run.losses, first, strict=True))


Figure = Callable[[Run], float | None]


def ratio(runs: Iterable[Run], others: Iterable[Run], figure: Figure = lambda run: run.throughput) -> Estimate | None:
    """Return the ratio of a figure, measured within each round; None if no round has it of both."""
    by_round = {run.round: figure(run) for run in others}
    pairs = [(own, base) for run in runs if (own := figure(run)) and (base := by_round.get(run.round))]
    return estimates.ratio(pairs) if pairs else None


def verdict(ratio: Estimate | None, *, is_less_better: bool = False) -> str:
    """Return what the interval of a ratio to the reference says: ahead, equal, behind or not resolved."""
    if ratio is None or ratio.size < 2:
        return "-"
    if ratio.low > 1 or ratio.high < 1:
        return "ahead" if (ratio.low > 1) != is_less_better else "behind"
    return "equal" if 1 - ratio.low <= _EQUAL and ratio.high - 1 <= _EQUAL else "not resolved"


def line(results: Results, competitor: str, workload: str, workers: int) -> Line:
    """A competitor's runs and those it is compared with."""

    def those(name: str) -> list[Run]:
        return [r for r in results.runs if (r.competitor, r.workload, r.workers) == (name, workload, workers)]

    return Line(those(competitor), those(REFERENCE[workers]))


def different(results: Results) -> list[str]:
    """Competitors that trained something else."""
    return [" ".join(map(str, key)) for key in _keys(results) if not line(results, *key).trains_the_same]


def page(results: Results) -> str:
    """All tables."""
    busy = max(results.busy)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    parts = [
        "# pipeline beside others" + (f", {results.taken} of the cores taken" if results.taken else ""),
        f"{results.machine}; {versions}. {results.rounds} rounds, all in turn within each; other processes took "
        f"{busy:.0%} of the cores at most just before a round."
        + (f" Meanwhile {results.taken} more computed without end." if results.taken else ""),
        EXPLANATION,
    ]
    for workload, workers in dict.fromkeys((run.workload, run.workers) for run in results.runs):
        parts += [f"## {workload}, {workers} worker{'s' if workers > 1 else ''}", _table(results, workload, workers)]
        parts += [_ends(results, workload, workers), *_tracking(results, workload, workers)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _names(results: Results, workload: str, workers: int) -> list[str]:
    names = [name for name, *rest in _keys(results) if tuple(rest) == (workload, workers)]
    return sorted(names, key=lambda name: not name.startswith("bare"))


def _ends(results: Results, workload: str, workers: int) -> str:
    """The table of what a training costs besides its steps: start, prompt, memory."""
    rows = [
        "| | first step, s | x bare | prompt, s | x bare | MB, all (PSS) | x bare |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in _names(results, workload, workers):
        cells = line(results, name, workload, workers).ends()
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _tracking(results: Results, workload: str, workers: int) -> Iterator[str]:
    """Yield lines on the cost of MLflow: ours with it over ours without."""
    for name, without in TRACKED.items():
        own, bare = (line(results, each, workload, workers).runs for each in (name, without))
        figures: list[tuple[str, Figure]] = [
            ("samples/s", lambda run: run.throughput),
            ("first step", lambda run: run.first_step_s),
            ("prompt", lambda run: run.prompt_s),
            ("memory", lambda run: run.all_peak_pss_mb),
        ]
        told = [f"{what} x {_told(found)}" for what, figure in figures if (found := ratio(own, bare, figure))]
        if told:
            yield f"Tracking, {name} with MLflow over the same without: {', '.join(told)}."


def _table(results: Results, workload: str, workers: int) -> str:
    rows = [
        "| | samples/s | step, ms | over bare, ms | x bare | | MB, worker | MB, all (RSS) | same losses |",
        "|---|--:|--:|--:|--:|---|--:|--:|---|",
    ]
    for name in _names(results, workload, workers):
        one = line(results, name, workload, workers)
        step = median(run.step_ms for run in one.runs)
        over = step - median(run.step_ms for run in one.reference)
        cells = [
            name,
            _spread(one.samples_per_second, ",.0f"),
            f"{step:.3g}",
            f"{over:+.2f}",
            _told(one.ratio),
            "-" if one.is_reference else verdict(one.ratio),
            f"{median(run.worker_peak_mb for run in one.runs):,.0f}",
            f"{median(run.all_peak_mb for run in one.runs):,.0f}",
            "yes" if one.trains_the_same else "no",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(ratio: Estimate | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.size > 1 else f"{ratio.value:.2f}"


def _spread(values: list[float], style: str) -> str:
    middle, low, high = (format(value, style) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _keys(results: Results) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys((run.competitor, run.workload, run.workers) for run in results.runs))
