"""The record that every command ends in, saved as ``result.json`` in the run's folder; every output is a loop over it.

A new number is one `Fact`, made where it is computed: terminal, page, ``--json``, MLflow and the Python API show it.
"""

import json
import math
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError, field_validator

from pipeline.errors import UsageError
from pipeline.experiment.values import Frozen
from pipeline.record.folder import write_atomically
from pipeline.wording import duration, figure

FILE_NAME = "result.json"
State = Literal["ok", "inconclusive", "invalid"]
WIDE = 3.0  # Ratio of an interval's ends from which the value between them says little, so that only the ends are shown
FAR = 100.0  # Ratio from which the end of an interval only says that nothing is known
NEGLIGIBLE = 1e-4  # Share of the longest end of a difference below which another is shown as 0: rounding of the metric


class Fact(Frozen):
    """A number, with its interval if it has one."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    key: str  # Name in JSON and in MLflow (`METRICS`), e.g. "speedup".
    value: float | None  # None if it is not known; NaN and infinity, which JSON does not have, are read back as None
    low: float | None = None
    high: float | None = None
    unit: Literal["", "x", "%", "s", "ms", "MiB", "samples/s", "+", "points"] = ""
    """Unit of the value; of "%" the value is a share, 1 for 100%. A difference, which has a sign, is in "points" of a
    rate, or in the metric's own unit, "+"."""
    label: str = ""  # Name for people; empty: the key
    state: State = "ok"
    trial: str = "main"  # Trial that it is about: the run in MLflow that gets it

    @property
    def has_interval(self) -> bool:
        """True if both ends are known."""
        return self.low is not None and self.high is not None

    @property
    def is_wide(self) -> bool:
        """True if the interval is so wide that the value says little."""
        return self.low is not None and self.high is not None and self.high > WIDE * self.low

    def __str__(self) -> str:
        return format_fact(self)


class Table(Frozen):
    """Facts in rows. The first table of a result is on its screen, the others on its page and behind ``--full``."""

    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[Fact | str, ...], ...]
    emphasis: int | None = None  # Index of the row that the result is about
    notes: tuple[str, ...] = ()
    is_folded: bool = False  # True if the page shows it when it is opened

    @field_validator("rows")
    @classmethod
    def _check_width(cls, rows: tuple[tuple[Fact | str, ...], ...], info: object) -> tuple[tuple[Fact | str, ...], ...]:
        header = getattr(info, "data", {}).get("header", ())
        if any(len(row) != len(header) for row in rows):
            raise ValueError("a row has another number of cells than the header")
        return rows


class Advice(Frozen):
    """A change to make, with the measurement behind it."""

    reason: str  # Sentence with the measurement, which names the part that explains it
    change: str = ""  # Change to make, in words; empty if ``overrides`` say it
    overrides: tuple[str, ...] = ()  # Words to add to ``pipeline run FILE``
    use: str = ""  # Name of the row that has measured the change; empty if it is a suggestion to try


class Result(Frozen):
    """Result of a command."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # of the cells of tables, too

    kind: Literal["run", "quick", "benchmark", "compare", "sweep", "evaluate", "export"]
    name: str  # Name of the experiment
    run: str = ""  # Id of the run, the name of its folder
    title: str  # First line of the screen: what ended, how, and on which machine
    hardware: str = ""
    label: str = "RESULT"  # Word at the left of the headline; "WARNING" if the speedup is not valid
    headline: tuple[str, ...]  # Sentences of the answer, each from a new line on
    verdict: str  # The answer in one line, for ``--quiet``, ``list`` and MLflow
    answer: str = ""  # The answer in a word, for scripts and as a tag, e.g. "better"; empty if the command has none.
    state: State = "ok"
    facts: tuple[Fact, ...] = ()
    tables: tuple[Table, ...] = ()
    advice: tuple[Advice, ...] = ()  # The first is on the screen
    next: tuple[tuple[str, str], ...] = ()
    """Next steps: a label in capitals, e.g. "NEXT", and a sentence or a shell command."""
    notes: tuple[str, ...] = ()  # The most important first: the screen has as many as there is room for
    places: tuple[tuple[str, str], ...] = ()  # Where more is: a label, e.g. "Report", and a path or a command.

    def fact(self, key: str, trial: str = "main") -> Fact | None:
        """Return a fact by its key and its trial, also one within a table; None if there is none."""
        return next((fact for fact in self.all_facts if (fact.key, fact.trial) == (key, trial)), None)

    @property
    def all_facts(self) -> tuple[Fact, ...]:
        """The facts, and those in the cells of tables, each once."""
        cells = (cell for table in self.tables for row in table.rows for cell in row if isinstance(cell, Fact))
        return tuple({(fact.key, fact.trial): fact for fact in (*cells, *self.facts)}.values())


def save(result: Result, folder: Path) -> None:
    """Write ``result.json`` into a run's folder, atomically."""
    write_atomically(folder / FILE_NAME, result.model_dump_json(indent=1) + "\n")


def read(folder: Path) -> Result | None:
    """Read the result of a run; None if its command hasn't ended with one."""
    try:
        return Result.model_validate_json((path := folder / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path}: damaged, or of another version. Remove it, and show says how to make it") from error


def format_fact(fact: Fact, *, with_interval: bool = True) -> str:
    """Format a number for people: the one place that knows how.

    A ratio is "1.84x (1.76 to 1.92)"; of a wide interval only its ends are shown, and of one that says nothing, that it
    was too noisy to measure.
    """
    if fact.state == "invalid":
        return "not valid"
    if fact.value is None or math.isnan(fact.value):
        return "-" if fact.value is None else "NaN"
    if fact.unit in ("+", "points"):
        return _format_difference(fact, with_interval=with_interval)
    is_clear = fact.unit != "x" or not fact.has_interval or not (fact.low or 0) <= 1 <= (fact.high or 0)
    if fact.low is None or fact.high is None or not with_interval:
        return _format_value(fact.value, fact.unit, is_clear=is_clear)
    low, high = (_format_value(end, fact.unit, is_clear=is_clear) for end in (fact.low, fact.high))
    if fact.unit == "x" and fact.low < 1 / FAR and fact.high > FAR:
        return "too noisy"
    if fact.is_wide:
        return f"{low} to {high if fact.unit != 'x' or fact.high < FAR * max(1, fact.value) else f'over {FAR:g}x'}"
    if fact.unit in ("x", "%"):
        low = low.removesuffix(fact.unit)
    return f"{_format_value(fact.value, fact.unit, is_clear=is_clear)} ({low} to {high.removesuffix('x')})"


def _format_difference(fact: Fact, *, with_interval: bool) -> str:
    """Format a difference with its sign, e.g. "+1.1 points (+0.38 to +1.9)"."""
    ends = [end for end in (fact.value, fact.low, fact.high) if end is not None]
    shown = [0.0 if abs(end) < NEGLIGIBLE * max(map(abs, ends)) else end for end in ends]
    value, *interval = (f"{end:+.2g}" if abs(end) < 10 else f"{end:+,.0f}" for end in shown)
    unit = "" if fact.unit == "+" else f" {fact.unit}"
    return f"{value}{unit} ({interval[0]} to {interval[1]})" if with_interval and interval[1:] else f"{value}{unit}"


def _format_value(value: float, unit: str, *, is_clear: bool) -> str:
    """Format one number; ``is_clear``: a ratio gets the decimals that show on which side of 1 it is."""
    match unit:
        case "x" if value < 1 / FAR:
            return f"under {1 / FAR:g}x"
        case "x":
            decimals = next((number for number in (2, 3) if round(value, number) != 1), 4) if is_clear else 2
            return f"{value:.{decimals}f}x" if value < 10 else f"{value:,.{0 if value >= FAR else 1}f}x"
        case "%":
            return f"{value:.0%}"
        case "s":
            return duration(value)
        case "ms":
            return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"
        case "MiB" | "samples/s":
            return figure(value, digits=max(3, len(f"{abs(value):.0f}")))
    return figure(value)


METRICS = {
    "compute_ms": "time/compute_ms",
    "exposed_communication_ms": "time/exposed_communication_ms",
    "data_wait_ms": "time/data_wait_ms",
    "rest_ms": "time/optimizer_and_other_ms",
    "communication_ms": "time/communication_ms",
    "communication_share": "time/communication_share",
    "compile_s": "time/compile_s",
    "peak_memory_mb": "memory/peak_mib",
}
"""Metrics whose name differs from the fact's key; with ``/`` MLflow draws them in groups."""
TAGS = ("speedup", "difference", "pairs")  # Facts that are tags, too, in words


def mlflow_metrics(result: Result) -> dict[str, dict[str, float]]:
    """Return the metrics of each trial by MLflow's names, with the ends of intervals."""
    named: dict[str, dict[str, float]] = {}
    for fact in result.all_facts:
        name = METRICS.get(fact.key, fact.key)
        ends = {name: fact.value, f"{name}_ci_low": fact.low, f"{name}_ci_high": fact.high}
        known = {key: value for key, value in ends.items() if value is not None and math.isfinite(value)}
        named.setdefault(fact.trial, {}).update(known)
    return named


def mlflow_tags(result: Result) -> dict[str, dict[str, str]]:
    """Return the tags of each trial."""
    named: dict[str, dict[str, str]] = {}
    for fact in result.all_facts:
        if fact.key in TAGS and fact.value is not None:
            doubt = {"ok": "", "inconclusive": "inconclusive, ", "invalid": ""}[fact.state]
            named.setdefault(fact.trial, {})[fact.key] = doubt + format_fact(fact)
    if result.answer:
        named.setdefault("main", {})["verdict"] = result.answer
    return named


def mlflow_description(result: Result) -> str:
    """Return the result in Markdown, for the description of the run."""
    parts = [f"**{result.verdict}**"]
    if result.tables:
        header, *rows = result.tables[0].header, *result.tables[0].rows
        lines = [list(header), ["---", *["--:"] * (len(header) - 1)]]
        lines += [[cell if isinstance(cell, str) else format_fact(cell) for cell in row] for row in rows]
        parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines))
    parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join([*parts, f"{result.hardware}."]) + "\n"


def mlflow_table(result: Result) -> str:
    """Return the facts of all trials in the format of MLflow's ``log_table``: a row for each trial."""
    facts = result.all_facts
    keys, trials = (list(dict.fromkeys(names)) for names in zip(*((f.key, f.trial) for f in facts), strict=True))
    values = {(one.trial, one.key): one.value for one in facts if one.value is not None and math.isfinite(one.value)}
    rows = [[trial, *(values.get((trial, key)) for key in keys)] for trial in trials]
    return json.dumps({"columns": ["trial", *keys], "data": rows}, allow_nan=False)
