"""Names of a report's rows by what they are, e.g. "2 workers (ddp)", the same in screens, tables and sentences."""

import re

from pipeline.report.numbers.forecast import Predicted
from pipeline.report.numbers.row import Row, Unmeasured
from pipeline.wording import counted

_REMARKS = re.compile(r" \(([^()]*)\)$")
"""What a trial's title adds in brackets, e.g. the options in which it differs from another configuration."""


def name_row(row: Row | Unmeasured | Predicted) -> str:
    """Name a row with its strategy, e.g. "1 worker", "2 workers (ddp)" or "1 process, both cores"."""
    if isinstance(row, Row) and _has_all_cores(row):
        return f"1 process, {_format_all_cores(row)}"
    found = _REMARKS.search(row.title)
    details = [*([] if row.strategy == "single" else [row.strategy]), *(found.groups() if found else ())]
    listed = ", ".join(details)
    return f"{count_workers(row)} ({listed})" if listed else count_workers(row)


def count_workers(row: Row | Unmeasured | Predicted) -> str:
    """Name a row without its strategy, e.g. "2 workers" or "1 process on both cores"."""
    if isinstance(row, Row) and _has_all_cores(row):
        return f"1 process on {_format_all_cores(row)}"
    if isinstance(row, Row) and row.workers == 1 and row.replicas > 1:  # DataParallel
        return f"1 process on {row.devices}"
    return counted(row.workers, "worker")


def label_row(row: Row | Unmeasured | Predicted) -> str:
    """Name a row in a table, where the baseline is marked."""
    name = name_row(row)
    if not isinstance(row, Row) or row.role != "baseline":
        return name
    return f"{name.removesuffix(')')}, baseline)" if name.endswith(")") else f"{name} (baseline)"


def are_several(row: Row) -> bool:
    """Return True if the row's name is in the plural."""
    return row.workers > 1


def _has_all_cores(row: Row) -> bool:
    return row.role == "reference" and row.device == "cpu" and row.workers == 1


def _format_all_cores(row: Row) -> str:
    return "1 core" if row.cpus == 1 else "both cores" if row.cpus == 2 else f"all {row.cpus} cores"
