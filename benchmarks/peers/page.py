"""The figures of `__main__` as Markdown."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from competitors import REFERENCE
from pydantic import BaseModel
from race import Run

from pipeline.protocol import estimates
from pipeline.protocol.estimates import Estimate

_TOLERANCE = 0.01
"""Of losses, relative to the first one: rounding, which training amplifies."""

EXPLANATION = """\
Each row does the same steps on the same batches from the same weights, one thread for each worker. samples/s: median
over the epochs of all rounds but each run's first epoch, and the lowest and highest of them. x bare: ratio to the loop
written by hand with as many workers, taken within each round, with its 95% interval. First step: from the
start of the command to the end of the first optimizer step. MB: of the largest worker, and of all processes of the run
together, where shared pages count once for each. How it is measured, and what is fair about it:
`docs/benchmarks.md`.
"""


class Results(BaseModel):
    """All that was measured."""

    machine: str
    versions: dict[str, str]
    rounds: int
    busy: list[float]
    """Part of the cores that other processes took just before each round."""
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
    def ratio(self) -> Estimate:
        """Ratio of throughputs to the reference, from the rounds that have both."""
        return ratio(self.runs, self.reference)

    @property
    def trains_the_same(self) -> bool:
        """Whether all losses that were kept are those of the reference."""
        first = self.reference[0].losses
        bound = _TOLERANCE * first[0]
        return all(abs(a - b) <= bound for run in self.runs for a, b in zip(run.losses, first, strict=True))


def ratio(runs: Iterable[Run], others: Iterable[Run]) -> Estimate:
    """Return the ratio of throughputs, measured within each round."""
    by_round = {run.round: run.throughput for run in others}
    return estimates.ratio([(run.throughput, by_round[run.round]) for run in runs if run.round in by_round])


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
        "# pipeline beside others",
        f"{results.machine}; {versions}. {results.rounds} rounds, all in turn within each; other processes took "
        f"{busy:.0%} of the cores at most just before a round.",
        EXPLANATION,
    ]
    for workload, workers in dict.fromkeys((run.workload, run.workers) for run in results.runs):
        parts += [f"## {workload}, {workers} worker{'s' if workers > 1 else ''}", _table(results, workload, workers)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(results: Results, workload: str, workers: int) -> str:
    names = [name for name, *rest in _keys(results) if tuple(rest) == (workload, workers)]
    rows = [
        "| | samples/s | step, ms | over bare, ms | x bare | first step, s | MB, worker | MB, all | same losses |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name in sorted(names, key=lambda name: not name.startswith("bare")):
        one = line(results, name, workload, workers)
        step = median(run.step_ms for run in one.runs)
        over = step - median(run.step_ms for run in one.reference)
        cells = [
            name,
            _spread(one.samples_per_second, ",.0f"),
            f"{step:.3g}",
            f"{over:+.2f}",
            _told(one.ratio),
            _spread([run.first_step_s for run in one.runs], ".1f"),
            f"{median(run.worker_peak_mb for run in one.runs):,.0f}",
            f"{median(run.all_peak_mb for run in one.runs):,.0f}",
            "yes" if one.trains_the_same else "no",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(ratio: Estimate) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.size > 1 else f"{ratio.value:.2f}"


def _spread(values: list[float], style: str) -> str:
    middle, low, high = (format(value, style) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _keys(results: Results) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys((run.competitor, run.workload, run.workers) for run in results.runs))
