"""The output of ``pipeline doctor`` in the terminal."""

import textwrap
from collections.abc import Iterator

import rich.console
from rich.text import Text

from pipeline.cluster.node_facts import NodeFacts
from pipeline.commands.doctor.check_result import CheckResult, amount
from pipeline.commands.doctor.examination import Examination
from pipeline.recording.terminal import headed, print_report_table
from pipeline.report.tables import Column, from_columns

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = len("problem ")
_Column = Column[NodeFacts]
_COLUMNS: tuple[_Column, ...] = (
    ("node", lambda node: node.node),
    ("Python", lambda node: node.python),
    ("torch", lambda node: node.torch.version if node.torch else "-"),
    ("Ray", lambda node: node.ray or "-"),
    ("cores", lambda node: str(node.cpus)),
    ("memory", lambda node: amount(node.memory_mb)),
)
_OF_CLUSTERS: tuple[_Column, ...] = (("address", lambda node: node.address or "-"),)
_OF_GPUS: tuple[_Column, ...] = (
    ("GPUs", lambda node: str(len(node.gpus))),
    ("driver", lambda node: node.driver or "-"),
    ("NCCL", lambda node: (node.torch.nccl if node.torch else None) or "-"),
)


def show(examination: Examination, *, terminal: rich.console.Console) -> None:
    """Print a table of the nodes, each finding with its fix, and the number of problems and warnings."""
    at = f"Ray cluster at {examination.address}" if examination.address else "this machine"
    columns = _columns(examination)
    print_report_table(from_columns(f"Doctor: {at}", columns, examination.nodes), console=terminal)
    terminal.print()
    for finding in examination.findings:
        _print(finding, terminal)
    terminal.print("", headed([_summary(examination)], width=terminal.width), sep="\n")


def _columns(examination: Examination) -> tuple[_Column, ...]:
    addresses = _OF_CLUSTERS if examination.address else ()
    return (*_COLUMNS[:1], *addresses, *_COLUMNS[1:], *(_OF_GPUS if any(n.gpus for n in examination.nodes) else ()))


def _print(finding: CheckResult, terminal: rich.console.Console) -> None:
    """Print a finding and its fix; the fix stays on one line, so that a command can be copied."""
    what = f"{finding.status:<{_INDENT}}{finding.subject}: {finding.what}"
    text = Text(textwrap.fill(what, terminal.width, subsequent_indent=" " * _INDENT, break_on_hyphens=False))
    text.stylize(_STYLES[finding.status], 0, len(finding.status))
    terminal.print(text, soft_wrap=True)
    if finding.fix:
        terminal.print(Text(" " * _INDENT + f"fix: {finding.fix}"), soft_wrap=True)


def _summary(examination: Examination) -> str:
    warnings = sum(finding.status == "warning" for finding in examination.findings)
    counts = list(_counts(len(examination.problems), warnings))
    return " and ".join(counts) + "." if counts else "No problems and no warnings."


def _counts(problems: int, warnings: int) -> Iterator[str]:
    for count, what in ((problems, "problem"), (warnings, "warning")):
        if count:
            yield f"{count} {what}{'s' if count > 1 else ''}"
