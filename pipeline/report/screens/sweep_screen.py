"""The screen of ``pipeline sweep``: the best trial, the best trials in a table, and how to go on with the best one."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.report.screens.screen_layout import Block, Column, Places, assemble, label, label_command, lay_out, wrap
from pipeline.report.swept import LEFT, STATES, Swept, SweptReport, SweptTrial, figure, short_names, shown
from pipeline.wording import counted

_MOST_TRIALS = 10
_MOST_FAILURES = 2
_NARROW_RANK = 100
"""Rank of a column that is left out before any parameter's column."""


def format_screen(report: SweptReport, places: Places) -> tuple[str, ...]:
    """Return the lines of the screen that ends ``pipeline sweep``."""
    swept = report.swept
    return assemble(
        [
            Block(wrap(_title(swept), rest="  ")),
            Block(tuple(_best(swept))),
            Block((*_table(swept), *_hidden(swept, places))),
            Block(tuple(_failures(swept)), rank=1),
            Block(tuple(_next(report, places))),
        ]
    )


def _title(swept: Swept) -> str:
    counts = Counter(trial.state for trial in swept.trials)
    ended = counts["finished"] + counts["stopped early"]
    stopped = f", {counts['stopped early']} of them stopped early (ASHA)" if counts["stopped early"] else ""
    others = [
        f"{count} {STATES[state]}" for state, count in counts.items() if state not in ("finished", "stopped early")
    ]
    return f"{swept.experiment}: {', '.join([f'{ended} of {len(swept.trials)} trials completed{stopped}', *others])}"


def _best(swept: Swept) -> Iterator[str]:
    if (best := swept.trial(swept.best)) is None:
        yield from label("RESULT", swept.describe_missing_best())
        return
    names = short_names(list(best.values))
    values = [f"{name} {shown(value)}" for name, value in zip(names, best.values.values(), strict=True)]
    result = f"trial {best.number}: {swept.metric} {figure(best.value)} after {counted(best.epochs, 'epoch')}"
    yield from label("BEST", result, ", ".join(values))


def _table(swept: Swept) -> tuple[str, ...]:
    trials, keys = swept.by_merit[:_MOST_TRIALS], swept.keys

    def column(head: str, cells: Sequence[str], *, rank: int = 0, is_text: bool = False) -> Column:
        return Column(head, tuple(cells), rank, is_text)

    columns = [
        column("trial", [str(trial.number) for trial in trials]),
        column(swept.metric, [figure(trial.value) for trial in trials]),
        column("epochs", [str(trial.epochs or "-") for trial in trials], rank=_NARROW_RANK),
        column("status", [STATES[trial.state] for trial in trials], is_text=True),
    ]
    for rank, (key, name) in enumerate(zip(keys, short_names(keys), strict=True), start=1):
        columns.append(column(name, [shown(trial.values.get(key)) for trial in trials], rank=rank))
    return lay_out(columns)


def _hidden(swept: Swept, places: Places) -> Iterator[str]:
    """Yield what the table leaves out, and what its values are."""
    if (more := len(swept.trials) - _MOST_TRIALS) > 0:
        yield from wrap(f"{more} more: pipeline show {places.run} --full")
    yield from wrap(f"{swept.metric} is the value after the trial's last epoch.")


def _failures(swept: Swept) -> Iterator[str]:
    failed: list[SweptTrial] = [trial for trial in swept.trials if trial.state == "failed"]
    for trial in failed[:_MOST_FAILURES]:
        yield from wrap(f"trial {trial.number} failed: {trial.message}")[:2]


def _next(report: SweptReport, places: Places) -> Iterator[str]:
    """Yield where the model is, and the commands to go on with."""
    swept = report.swept
    if left := sum(trial.state in LEFT for trial in swept.trials):
        yield from label(
            "Resume", f"{left} of {len(swept.trials)} trials are left; --resume {places.run} continues them"
        )
    if swept.best is not None and report.logs_model:
        yield from label("Model", f"logged to MLflow with trial {swept.best}")
    if report.swept.command:
        yield from label_command("Retrain", report.swept.command)
    if report.swept.confirmation:
        yield from label_command("Confirm", report.swept.confirmation)
    if places.page:
        yield from label("Report", places.page)
