"""The names that facts have in MLflow: metrics of their trial's run, tags for its table of runs, and a table."""

import json
import math

from pipeline.results.record import Result, format_fact

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
TAGS = ("speedup", "difference", "pairs")
"""Facts that are tags, too, in words."""


def metrics(result: Result) -> dict[str, dict[str, float]]:
    """Return the metrics of each trial by MLflow's names, with the ends of intervals."""
    named: dict[str, dict[str, float]] = {}
    for fact in result.all_facts:
        name = METRICS.get(fact.key, fact.key)
        ends = {name: fact.value, f"{name}_ci_low": fact.low, f"{name}_ci_high": fact.high}
        known = {key: value for key, value in ends.items() if value is not None and math.isfinite(value)}
        named.setdefault(fact.trial, {}).update(known)
    return named


def tags(result: Result) -> dict[str, dict[str, str]]:
    """Return the tags of each trial."""
    named: dict[str, dict[str, str]] = {}
    for fact in result.all_facts:
        if fact.key in TAGS and fact.value is not None:
            doubt = {"ok": "", "inconclusive": "inconclusive, ", "invalid": ""}[fact.state]
            named.setdefault(fact.trial, {})[fact.key] = doubt + format_fact(fact)
    if result.answer:
        named.setdefault("main", {})["verdict"] = result.answer
    return named


def describe(result: Result) -> str:
    """Return the result in Markdown, for the description of the run."""
    parts = [f"**{result.verdict}**"]
    if result.tables:
        header, *rows = result.tables[0].header, *result.tables[0].rows
        lines = [list(header), ["---", *["--:"] * (len(header) - 1)]]
        lines += [[cell if isinstance(cell, str) else format_fact(cell) for cell in row] for row in rows]
        parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines))
    parts += ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n\n".join([*parts, f"{result.hardware}."]) + "\n"


def table_json(result: Result) -> str:
    """Return the facts of all trials in the format of MLflow's ``log_table``: a row for each trial."""
    facts = result.all_facts
    keys, trials = (list(dict.fromkeys(names)) for names in zip(*((f.key, f.trial) for f in facts), strict=True))
    values = {(one.trial, one.key): one.value for one in facts if one.value is not None and math.isfinite(one.value)}
    rows = [[trial, *(values.get((trial, key)) for key in keys)] for trial in trials]
    return json.dumps({"columns": ["trial", *keys], "data": rows}, allow_nan=False)
