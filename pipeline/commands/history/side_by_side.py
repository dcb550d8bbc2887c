"""A difference of two runs in the terminal."""

from collections.abc import Mapping

import rich.console
from rich.table import Table
from rich.text import Text

from pipeline.commands.history.difference import Difference, Pair

_NAME_SHARE = 0.4  # of the width, at most


def show(difference: Difference, *, console: rich.console.Console) -> None:
    """Print what differs, in three tables; those that would be empty are left out."""
    for letter, run in (("a", difference.a), ("b", difference.b)):
        console.print(Text(f"{letter}  {run.run}", style="bold"), soft_wrap=True)
    sections = {
        "Configuration": difference.configuration,
        "Environment": difference.environment,
        "Results": difference.results,
    }
    for title, pairs in sections.items():
        if pairs:
            console.print("", Text(title, style="bold"), _table(pairs, width=console.width), sep="\n")
    same = [title.lower() for title, pairs in sections.items() if not pairs]
    if same:
        console.print(f"\nthe same: {', '.join(same)}", markup=False)


def _table(pairs: Mapping[str, Pair], *, width: int) -> Table:
    has_change = any(pair.change for pair in pairs.values())
    table = Table(box=None, pad_edge=False, show_header=True, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", max_width=int(width * _NAME_SHARE))
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
