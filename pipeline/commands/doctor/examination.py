"""All checks in order: nodes, versions, GPUs, machine, tracking store; and their results in the terminal."""

import textwrap
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import rich.console
from rich.text import Text

from pipeline.commands.doctor import machine, tracking
from pipeline.commands.doctor.check_result import CheckResult, amount
from pipeline.experiment.schema import Parallel
from pipeline.experiment.values import Frozen
from pipeline.launch.node_facts import NodeFacts, facts_here
from pipeline.record.screen import headed, print_report_table
from pipeline.report.text.tables import Column, from_columns
from pipeline.wording import counted

Say = Callable[[str], None]
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
    ("free", lambda node: amount(node.memory_free_mb)),
)
_OF_CLUSTERS: tuple[_Column, ...] = (("address", lambda node: node.address or "-"),)
_OF_GPUS: tuple[_Column, ...] = (
    ("GPUs", lambda node: str(len(node.gpus))),
    ("driver", lambda node: node.driver or "-"),
    ("NCCL", lambda node: (node.torch.nccl if node.torch else None) or "-"),
)


class Examination(Frozen):
    """Facts about this machine or a cluster, and the results of all checks."""

    address: str | None
    """Address of the Ray cluster, or None for this machine."""
    nodes: tuple[NodeFacts, ...]
    findings: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The findings that would stop a run."""
        return tuple(finding for finding in self.findings if finding.status == "problem")


def examine(parallel: Parallel, *, uri: str | None, say: Say) -> Examination:
    """Check this machine, or, with launcher ray, the cluster that ``parallel.address`` or RAY_ADDRESS names.

    Args:
        parallel: settings that say where runs place their workers.
        uri: address of the tracking store; default: MLFLOW_TRACKING_URI, or a file in the working directory.
        say: called with a line before each wait.

    Raises:
        ResourceError: there is no cluster at the address.
    """
    here = facts_here()
    address = parallel.cluster if parallel.launcher == "ray" else None
    findings: list[CheckResult] = []
    with ExitStack() as stack:
        if address is not None:
            from pipeline.launch.cluster import connected

            stack.enter_context(connected(address, verbose=False))
            say(f"asking the nodes of the Ray cluster at {address} ...")
        asked = (here,) if address is None else _asked(findings)
        findings += machine.check_nodes(asked, here=here)
    say("asking MLflow ...")
    findings.append(tracking.check_tracking(tracking.store(uri), client=here.mlflow))
    return Examination(address=address, nodes=asked, findings=tuple(findings))


def _asked(findings: list[CheckResult]) -> tuple[NodeFacts, ...]:
    """Return the facts of the nodes that answer; add a problem for each node that does not."""
    from pipeline.launch.cluster import ask_nodes

    answers, silent = ask_nodes()
    fix = "on that node: ray stop; ray start --address ADDRESS"
    findings += [
        CheckResult(subject="nodes", status="problem", what=f"{node}: {why}", fix=fix) for node, why in silent.items()
    ]
    if not silent:
        findings.append(CheckResult(subject="nodes", status="ok", what=f"all answer ({len(answers)})"))
    return tuple(answers)


def show(examination: Examination, *, terminal: rich.console.Console) -> None:
    """Print a table of the nodes, each finding with its fix, and how many checks passed."""
    at = f"Ray cluster at {examination.address}" if examination.address else "this machine"
    columns = _columns_of(examination)
    print_report_table(from_columns(f"Doctor: {at}", columns, examination.nodes), console=terminal)
    terminal.print()
    for finding in examination.findings:
        _print(finding, terminal)
    terminal.print("", headed([_counted_findings(examination)], width=terminal.width), sep="\n")


def _columns_of(examination: Examination) -> tuple[_Column, ...]:
    addresses = _OF_CLUSTERS if examination.address else ()
    return (*_COLUMNS[:1], *addresses, *_COLUMNS[1:], *(_OF_GPUS if any(n.gpus for n in examination.nodes) else ()))


def _print(finding: CheckResult, terminal: rich.console.Console) -> None:
    """Print a finding and its fix; the fix stays on one line, so that a command can be copied."""
    line = f"{finding.status:<{_INDENT}}{finding.subject}: {finding.what}"
    text = Text(textwrap.fill(line, terminal.width, subsequent_indent=" " * _INDENT, break_on_hyphens=False))
    text.stylize(_STYLES[finding.status], 0, len(finding.status))
    terminal.print(text, soft_wrap=True)
    if finding.fix:
        terminal.print(Text(" " * _INDENT + f"fix: {finding.fix}"), soft_wrap=True)


def _counted_findings(examination: Examination) -> str:
    """Return e.g. "All 10 checks passed." or "1 problem and 2 warnings. 8 of 10 checks passed."."""
    counts = Counter(finding.status for finding in examination.findings if finding.status != "ok")
    checks = {finding.subject for finding in examination.findings}
    passed = checks - {finding.subject for finding in examination.findings if finding.status != "ok"}
    if not counts:
        return f"All {len(checks)} checks passed."
    told = " and ".join(counted(counts[status], status) for status in ("problem", "warning") if counts[status])
    return f"{told}. {len(passed)} of {len(checks)} checks passed."
