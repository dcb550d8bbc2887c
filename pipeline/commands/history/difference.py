"""``pipeline diff``: differences of two runs in configuration, environment and results."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from pipeline.commands.history.run_result import report_of
from pipeline.config.values import Frozen
from pipeline.errors import UsageError
from pipeline.protocol.events import RunOpened
from pipeline.recording.folder import ENVIRONMENT_NAME
from pipeline.recording.runs import RunSummary, last_opened
from pipeline.recording.terminal import print_table
from pipeline.report import Row

_TAGS = ("git_commit", "git_dirty", "hardware", "user", "python")
_COMMENT = "# "
_NAME_SHARE = 0.4  # of the terminal's width
_MANY = 10.0  # ratio from which a multiple is easier to read than percent
_REACHED = ("validation/", "train/loss")


class Pair(Frozen):
    """The values of two runs under the same name; None if a run has no such value."""

    a: str | float | None
    b: str | float | None

    @property
    def change(self) -> str:
        """Relative change from ``a`` to ``b``, e.g. "+12.5%" or "14x"; empty for texts."""
        if not (isinstance(self.a, float) and isinstance(self.b, float)) or not self.a:
            return ""
        ratio = self.b / self.a
        return f"{ratio - 1:+.1%}" if abs(ratio) < _MANY else f"{ratio:,.0f}x"


class Difference(Frozen):
    """Values that differ between two runs, by name."""

    a: RunSummary
    b: RunSummary
    configuration: Mapping[str, Pair]
    """By key of the experiment file."""
    environment: Mapping[str, Pair]
    """Code, machine and installed packages."""
    results: Mapping[str, Pair]
    """Status and figures; names of a trial's figures are "title: figure"."""


def difference(a: RunSummary, b: RunSummary) -> Difference:
    """Compare two runs."""
    opened = last_opened(a.folder), last_opened(b.folder)
    return Difference(
        a=a,
        b=b,
        configuration=_pairs(opened[0].params, opened[1].params),
        environment=_pairs(_environment(opened[0], a.folder), _environment(opened[1], b.folder)),
        results=_pairs(dict(_results(a)), dict(_results(b))),
    )


def show_difference(difference: Difference, *, console: rich.console.Console) -> None:
    """Print the differences in up to three tables; name the parts that do not differ."""
    for letter, run in (("a", difference.a), ("b", difference.b)):
        console.print(Text(f"{letter}  {run.run}", style="bold"), soft_wrap=True)
    sections = {
        "Configuration": difference.configuration,
        "Environment": difference.environment,
        "Results": difference.results,
    }
    for title, pairs in sections.items():
        if pairs:
            console.print("", Text(title, style="bold"), sep="\n")
            print_table(_table(pairs, console), console=console)
    same = [title.lower() for title, pairs in sections.items() if not pairs]
    if same:
        console.print(f"\nno differences: {', '.join(same)}", markup=False)


def _pairs(a: Mapping[str, str | float], b: Mapping[str, str | float]) -> dict[str, Pair]:
    names = dict.fromkeys((*a, *b))
    return {name: Pair(a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name)}


def _environment(opened: RunOpened, folder: Path) -> dict[str, str]:
    tags = {name.replace("_", " "): opened.tags[name] for name in _TAGS if name in opened.tags}
    try:
        lines = (folder / ENVIRONMENT_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return tags
    platform = lines[0].removeprefix(_COMMENT).partition(", ")[2] if lines else ""
    packages = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith(_COMMENT))
    return {**tags, "platform": platform, **packages}


def _results(run: RunSummary) -> Iterator[tuple[str, str | float]]:
    yield "command", run.command
    yield "status", run.status
    if run.message:
        yield "message", run.message
    if run.ended is not None:
        yield "seconds in all", (run.ended - run.began).total_seconds()
    try:
        report = report_of(run)
    except UsageError as error:
        yield "report", str(error)
        return
    if report is None:
        return
    for row in report.rows:
        yield from ((f"{row.title}: {name}", value) for name, value in _figures(row) if value is not None)
    yield from ((name, float(value)) for name, value in report.main.metrics.items() if name.startswith(_REACHED))


def _figures(row: Row) -> Iterator[tuple[str, str | float | None]]:
    yield "samples/s", row.samples_per_second.median
    yield "speedup", row.speedup
    yield "speedup from", None if row.ratio is None else _method(row)
    yield "efficiency", row.efficiency
    yield "step, ms", row.step_ms.median
    yield "exposed communication, ms", row.parts.exposed_communication_ms
    yield "data wait, ms", row.parts.data_wait_ms
    yield "peak memory, MB", max(row.peak_memory_mb, default=None)
    yield "time to first step, s", row.time_to_first_step_s


def _method(row: Row) -> str:
    return f"{row.speedup_pairs} pairs measured in turn" if row.speedup_pairs else "windows, one trial after the other"


def _table(pairs: Mapping[str, Pair], console: rich.console.Console) -> Table:
    has_change = any(pair.change for pair in pairs.values())
    table = Table(box=None, pad_edge=False, show_header=True, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", max_width=int(console.width * _NAME_SHARE) if console.is_terminal else None)
    for name in ("a", "b"):
        table.add_column(name, overflow="fold")
    if has_change:
        table.add_column("change", justify="right", no_wrap=True)
    for name, pair in pairs.items():
        cells = [Text(name), Text(_shown(pair.a)), Text(_shown(pair.b))]
        table.add_row(*cells, *([pair.change] if has_change else []))
    return table


def _shown(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
