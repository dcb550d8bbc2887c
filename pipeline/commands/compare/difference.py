"""Differences of two runs in results, configuration and environment."""

from collections.abc import Iterator, Mapping, Sequence

import rich.console
from rich.table import Table
from rich.text import Text

from pipeline.commands.compare.compared_figures import ComparedFigures, Figure, iter_learned, measured
from pipeline.commands.earlier_report import report_of
from pipeline.errors import UsageError
from pipeline.experiment.values import Frozen
from pipeline.record.run_summary import RunSummary, data_of, environment_of, last_opened
from pipeline.record.screen import print_table
from pipeline.wording import figure

_NAME_SHARE = 0.4  # of the terminal's width
_THROUGHPUT = ": samples/s"
_STYLES = {"better": "green", "worse": "red", "within noise": "dim"}


class Pair(Frozen):
    """Two texts under the same name; None if a run has no such text."""

    a: str | None
    b: str | None


class Difference(Frozen):
    """Values that differ between two runs, by name."""

    a: RunSummary
    b: RunSummary
    results: Mapping[str, ComparedFigures | Pair]
    """Validation metrics, status and figures; names of a trial's figures are "title: figure"."""
    configuration: Mapping[str, Pair]
    """By key of the experiment file."""
    environment: Mapping[str, Pair]
    """Code, machine, data and installed packages."""


def difference(a: RunSummary, b: RunSummary) -> Difference:
    """Compare two runs."""
    opened = last_opened(a.folder), last_opened(b.folder)
    return Difference(
        a=a,
        b=b,
        results=_results_of(dict(_results(a)), dict(_results(b))),
        configuration=_pairs(*(each.params for each in opened)),
        environment=_pairs(*({**environment_of(one.folder), **data_of(one.folder)} for one in (a, b))),
    )


def show_difference(
    difference: Difference, *, titles: tuple[str, str], with_results: bool, console: rich.console.Console
) -> None:
    """Print the differences in tables below the titles of both; name the parts that do not differ."""
    for title in titles:
        console.print(Text(title, style="bold"), soft_wrap=True)
    sections: dict[str, Mapping[str, ComparedFigures | Pair]] = {
        **({"Results": difference.results} if with_results else {}),
        "Configuration": {**difference.configuration},
        "Environment": {**difference.environment},
    }
    for title, pairs in sections.items():
        if pairs:
            console.print("", Text(title, style="bold"), sep="\n")
            names = [title.partition(" ")[0] for title in titles]
            print_table(_table(pairs, console, names=names), console=console)
    same = [title.lower() for title, pairs in sections.items() if not pairs]
    if same:
        console.print(f"\nno differences: {', '.join(same)}", markup=False)


def _pairs(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, Pair]:
    names = dict.fromkeys((*a, *b))
    return {name: Pair(a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name)}


def _results_of(a: Mapping[str, str | Figure], b: Mapping[str, str | Figure]) -> dict[str, ComparedFigures | Pair]:
    """Return what differs, metrics first; of a trial that only one of the runs has, the throughput."""
    found: dict[str, ComparedFigures | Pair] = {}
    trials = [{title for name in values if (title := _title(name))} for values in (a, b)]
    for name in sorted(dict.fromkeys((*a, *b)), key=lambda name: not name.startswith(("validation/", "train/"))):
        if _title(name) in trials[0] ^ trials[1] and not name.endswith(_THROUGHPUT):
            continue
        figures = [value if isinstance(value := values.get(name), Figure) else None for values in (a, b)]
        texts = [value if isinstance(value := values.get(name), str) else None for values in (a, b)]
        if any(figures) and (compared := ComparedFigures.of(*figures)).differs:
            found[name] = compared
        elif texts[0] != texts[1]:
            found[name] = Pair(a=texts[0], b=texts[1])
    return found


def _title(name: str) -> str:
    """Return the trial of a figure's name; empty for figures of the whole run."""
    return name.rpartition(": ")[0]


def _results(run: RunSummary) -> Iterator[tuple[str, str | Figure]]:
    yield from iter_learned(run.metrics)
    yield "command", run.command
    yield "status", run.status
    if run.message:
        yield "message", run.message
    if run.seconds is not None:
        yield "seconds in all", Figure(run.seconds)
    try:
        report = report_of(run)
    except UsageError as error:
        yield "report", str(error)
        return
    for row in report.rows if report is not None else ():
        yield from ((f"{row.title}: {name}", value) for name, value in measured(row))


def _table(
    pairs: Mapping[str, ComparedFigures | Pair], console: rich.console.Console, *, names: Sequence[str]
) -> Table:
    figures = [pair for pair in pairs.values() if isinstance(pair, ComparedFigures)]
    has_change, is_judged = any(pair.change for pair in figures), any(pair.judgement for pair in figures)
    table = Table(box=None, pad_edge=False, show_header=True, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", max_width=int(console.width * _NAME_SHARE) if console.is_terminal else None)
    for name in names:
        table.add_column(name, overflow="fold")
    if has_change:
        table.add_column("change", justify="right", no_wrap=True)
    if is_judged:
        table.add_column("", no_wrap=True)
    for name, pair in pairs.items():
        cells = [Text(name), Text(_shown(pair.a)), Text(_shown(pair.b))]
        change, judgement = (pair.change, pair.judgement) if isinstance(pair, ComparedFigures) else ("", "")
        verdict = [Text(judgement, style=_STYLES.get(judgement, ""))]
        table.add_row(*cells, *([change] if has_change else []), *(verdict if is_judged else []))
    return table


def _shown(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else figure(value)
