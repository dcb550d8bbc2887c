"""``pipeline doctor``: versions, GPUs, shared memory and the tracking store of this machine or of a cluster's nodes."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import rich.console
import typer
from rich.text import Text

from pipeline.commands.options import Json, print_json, say
from pipeline.errors import ResourceError
from pipeline.experiment.load import load
from pipeline.experiment.schema import Parallel
from pipeline.experiment.uris import default_address, without_credentials, without_credentials_in
from pipeline.experiment.values import Frozen
from pipeline.launch.node_facts import INSTALL_SAME_COMMIT, NodeFacts, facts_here
from pipeline.record.screen import OptionalConsole
from pipeline.results.record import Table
from pipeline.results.terminal import format_table
from pipeline.tracking.store import check_store, is_server, resolve_uri, with_credentials
from pipeline.wording import counted

if TYPE_CHECKING:
    import requests

Status = Literal["ok", "warning", "problem"]
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = len("problem ")
_SHARED_MB, _SHARED_FREE_MB = 1024, 256
_INSTALLS = {
    "Python": "use Python {}",
    "torch": "pip install torch=={}",
    "ray": "pip install 'ray[train]=={}' && ray stop",
    "ddp-pipeline": f"{INSTALL_SAME_COMMIT} (release {{}})",
}
"""Fixes of a version that differs from this machine's, by package."""
_TIMEOUT_S = 5
_LOG_IN = "export MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=PASSWORD"
_REFUSALS = {
    401: ("requires a valid login", _LOG_IN),
    403: ("denies access to experiments", _LOG_IN),
    404: ("is not an MLflow server", "set tracking.uri to the address that shows the MLflow UI"),
}
_WRONG_NAME = "Invalid Host"


class CheckResult(Frozen):
    """The result of one check: its status, the measured values, and a fix."""

    subject: str  # Subject in one or two words, e.g. "shared memory".
    status: Status  # ok; warning: a run would start, with a drawback; problem: a run would fail
    what: str  # The finding, with the measured values
    fix: str = ""  # A command or an action that fixes it; empty if nothing has to be fixed


class Examination(Frozen):
    """Facts about this machine or a cluster, and the results of all checks."""

    address: str | None  # Address of the Ray cluster, or None for this machine
    nodes: tuple[NodeFacts, ...]
    findings: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The findings that would stop a run."""
        return tuple(finding for finding in self.findings if finding.status == "problem")


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Experiment file. Its tracking server and its cluster are also checked.",
            show_default=False,
        ),
    ] = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Ray cluster to check. Default: the cluster of FILE, or RAY_ADDRESS."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine or a cluster, and print each problem with its fix."""
    experiment = load(file).experiment if file is not None else None
    parallel = experiment.parallel if experiment else Parallel(launcher="ray")
    if address is not None:
        parallel = parallel.model_copy(update={"launcher": "ray", "address": address})
    examination = examine(parallel, uri=experiment.tracking.uri if experiment else None, say=partial(say, err=True))
    if as_json:
        print_json(examination.model_dump_json(indent=2))
    else:
        show(examination, terminal=OptionalConsole(highlight=False))
    if examination.problems:
        raise typer.Exit(ResourceError.exit_code)


def examine(parallel: Parallel, *, uri: str | None, say: Callable[[str], None]) -> Examination:
    """Check this machine, or, with launcher ray, the cluster that ``parallel.address`` or RAY_ADDRESS names."""
    here = facts_here()
    address = parallel.cluster if parallel.launcher == "ray" else None
    nodes: tuple[NodeFacts, ...] = (here,)
    findings: list[CheckResult] = []
    with ExitStack() as stack:
        if address is not None:
            from pipeline.launch.cluster import ask_nodes, connected

            stack.enter_context(connected(address, verbose=False))
            say(f"asking the nodes of the Ray cluster at {address} ...")
            answers, silent = ask_nodes()
            nodes = tuple(answers)
            fix = "on that node: ray stop; ray start --address ADDRESS"
            findings += [_problem("nodes", f"{node}: {why}", fix) for node, why in silent.items()]
            if not silent:
                findings.append(_ok("nodes", f"all answer ({len(answers)})"))
        findings += check_nodes(nodes, here=here)
    say("asking MLflow ...")
    findings.append(check_tracking(find_store(uri), client=here.mlflow))
    return Examination(address=address, nodes=nodes, findings=tuple(findings))


def show(examination: Examination, *, terminal: rich.console.Console) -> None:
    """Print a table of the nodes, each finding with its fix, and how many checks passed."""
    at = f"Ray cluster at {examination.address}" if examination.address else "this machine"
    header = ["node", "Python", "torch", "Ray", "cores", "memory", "free"]
    header += ["address"] * bool(examination.address)
    has_gpus = any(node.gpus for node in examination.nodes)
    header += ["GPUs", "driver", "NCCL"] * has_gpus
    rows = []
    for node in examination.nodes:
        torch = node.torch
        row = [node.node, node.python, torch.version if torch else "-", node.ray or "-", str(node.cpus)]
        row += [_amount(node.memory_mb), _amount(node.memory_free_mb)]
        row += [node.address or "-"] * bool(examination.address)
        row += [str(len(node.gpus)), node.driver or "-", (torch.nccl if torch else None) or "-"] * has_gpus
        rows.append(tuple(row))
    table = format_table(Table(header=tuple(header), rows=tuple(rows)), width=max(terminal.width, 80))
    for line in (f"Doctor: {at}", *table, ""):
        terminal.print(Text(line), soft_wrap=True)
    for finding in examination.findings:
        line = f"{finding.status:<{_INDENT}}{finding.subject}: {finding.what}"
        text = Text(textwrap.fill(line, terminal.width, subsequent_indent=" " * _INDENT, break_on_hyphens=False))
        text.stylize(_STYLES[finding.status], 0, len(finding.status))
        terminal.print(text, soft_wrap=True)
        if finding.fix:  # in one line, so that a command can be copied
            terminal.print(Text(" " * _INDENT + f"fix: {finding.fix}"), soft_wrap=True)
    counts = Counter(finding.status for finding in examination.findings if finding.status != "ok")
    checks = {finding.subject for finding in examination.findings}
    passed = checks - {finding.subject for finding in examination.findings if finding.status != "ok"}
    bad = " and ".join(counted(counts[status], status) for status in ("problem", "warning") if counts[status])
    end = f"{bad}. {len(passed)} of {len(checks)} checks passed." if bad else f"All {len(checks)} checks passed."
    terminal.print("", Text(end, style="bold"), sep="\n")


def check_nodes(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> Iterator[CheckResult]:
    """Check all nodes that have answered: versions as on this machine, ``here``, GPUs, and shared memory."""
    if not nodes:
        return
    yield from _check_versions(nodes, here=here)
    shown = sum(node.torch.cuda_devices for node in nodes if node.torch)
    is_equal = shown == sum(len(node.gpus) for node in nodes)
    hidden = "" if is_equal else f". CUDA shows {shown}. Check CUDA_VISIBLE_DEVICES and MIG"
    yield from _judge(nodes, _judge_gpus) or [_ok("GPUs", _count_gpus(nodes) + hidden)]
    if len({gpu.name for node in nodes for gpu in node.gpus}) > 1 or len({len(node.gpus) for node in nodes}) > 1:
        each = ", ".join(f"{node.label}: {_count_gpus([node])}" for node in nodes)
        fix = "measure the slowdown with pipeline benchmark FILE, or leave the slowest node out"
        yield _warning("GPUs", f"the nodes' GPUs differ ({each})", fix)
    if sizes := [node.shared_memory_mb for node in nodes if node.shared_memory_mb is not None]:
        enough = f"/dev/shm is {_amount(min(sizes))}" + " or larger" * (len(set(sizes)) > 1)  # noqa: S108 - only looked at
        yield from _judge(nodes, _judge_shared_memory) or [_ok("shared memory", enough)]


def _check_versions(nodes: Sequence[NodeFacts], *, here: NodeFacts) -> Iterator[CheckResult]:
    """Compare each node with this machine, which runs are started from."""
    differing: dict[tuple[str, str | None], list[str]] = {}
    for node in nodes:
        for package, version in node.versions.items():
            if version is None or version != here.versions[package]:
                differing.setdefault((package, version), []).append(node.label)
    for (package, version), labels in differing.items():
        where, has, name = _list(labels), "have" if len(labels) > 1 else "has", package.replace("ray", "Ray")
        own = here.versions[package]
        what = f"{where} {has} {f'{name} {version}' if version else f'no {name}'}"
        what += f", and this machine has {own}" if own else ""
        yield _problem("versions", what, f"on {where}: {_INSTALLS[package].format(own)}")
    if not differing:
        everywhere = f" on all {len(nodes)} nodes" if len(nodes) > 1 else ""
        torch = here.torch.version if here.torch else None
        yield _ok("versions", f"Python {here.python}, torch {torch}, Ray {here.ray}, MLflow {here.mlflow}{everywhere}")


def _judge_gpus(node: NodeFacts) -> CheckResult | None:
    torch = node.torch
    if node.gpu_error is not None:
        what, fix = f"nvidia-smi fails: {node.gpu_error.splitlines()[0]}", "run nvidia-smi; reboot after an update"
    elif not node.gpus or torch is None:
        return None
    elif torch.cuda is None:
        what = f"{_count_gpus([node])}, but torch {torch.version} is built for CPUs only"
        fix = f"pip uninstall --yes torch && pip install torch=={torch.version.partition('+')[0]}"
    elif node.driver_cuda and int(node.driver_cuda.split(".")[0]) < int(torch.cuda.split(".")[0]):
        what = f"driver {node.driver} supports CUDA up to {node.driver_cuda}. torch {torch.version} needs {torch.cuda}"
        fix = f"update the NVIDIA driver, or install a torch built for CUDA {node.driver_cuda.split('.')[0]}"
    elif not torch.cuda_available:
        what = f"torch {torch.version} can't use the GPUs: {torch.cuda_error}"
        fix = "python -c \"import torch; torch.zeros(1, device='cuda')\""
    else:
        return None
    return _problem("GPUs", what, fix)


def _judge_shared_memory(node: NodeFacts) -> CheckResult | None:
    size, free = node.shared_memory_mb, node.shared_memory_free_mb
    if size is None or free is None or (size >= _SHARED_MB and free >= _SHARED_FREE_MB):
        return None
    loaders = "DataLoader workers (loader.num_workers) and Ray store batches there, and crash when it is full"
    fix = "docker run --shm-size=2g, shm_size: 2gb in compose.yaml, or mount -o remount,size=2G /dev/shm"
    return _warning("shared memory", f"{_amount(free)} of {_amount(size)} are free in /dev/shm. {loaders}", fix)


def _judge(nodes: Sequence[NodeFacts], judge: Callable[[NodeFacts], CheckResult | None]) -> list[CheckResult]:
    """Judge each node; return each distinct finding once, with the names of its nodes if there are several."""
    found: dict[CheckResult, list[str]] = {}
    for node in nodes:
        if finding := judge(node):
            found.setdefault(finding, []).append(node.label)
    places = {finding: f"{_list(labels)}: " if len(nodes) > 1 else "" for finding, labels in found.items()}
    return [finding.model_copy(update={"what": place + finding.what}) for finding, place in places.items()]


def _count_gpus(nodes: Sequence[NodeFacts]) -> str:
    counts = Counter(gpu.name for node in nodes for gpu in node.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none (training runs on the CPU)"


def find_store(uri: str | None) -> str:
    """Return the address of the store: ``uri``, MLFLOW_TRACKING_URI, or a SQLite file in the working directory."""
    return resolve_uri(uri or default_address(), base=Path.cwd())


def check_tracking(uri: str, *, client: str | None) -> CheckResult:
    """Check that the store accepts results."""
    shown = without_credentials(uri)
    try:
        warning = check_store(uri)
    except ResourceError as error:
        what, _, fix = without_credentials_in(str(error)).removesuffix(".").rpartition(". ")
        return _problem("MLflow", what, fix)
    if warning is not None:
        fix = f"from here, curl {shown.rstrip('/')}/health; to start the server, mlflow server --host ... --port ..."
        return _warning("MLflow", without_credentials_in(warning), fix)
    if not is_server(uri):
        return _ok("MLflow", f"{shown} can be written")
    try:
        answer = _ask(with_credentials(uri), "/api/2.0/mlflow/experiments/search?max_results=1")
        version = _ask(with_credentials(uri), "/version")
    except ResourceError as error:
        return _warning("MLflow", f"{shown} {error}", "check the server's log")
    if answer.status_code in _REFUSALS:
        what, fix = _REFUSALS[answer.status_code]
        if _WRONG_NAME in answer.text:
            host = urlsplit(shown).netloc
            what, fix = f"rejects the host name {host}", f"mlflow server --allowed-hosts {host} ..., on the server"
        reply = " ".join(answer.text.split())[:100]
        return _problem("MLflow", f"{shown} {what} ({answer.status_code}: {reply})", fix)
    if answer.status_code != 200:
        what = f"{shown} answers with status {answer.status_code}. Results wait in the runs' folders meanwhile"
        return _warning("MLflow", what, "check the server's log")
    server = version.text.strip() if version.status_code == 200 else ""
    if not server or client is None:
        return _ok("MLflow", f"{shown} accepts results. Its version is unknown")
    what = f"{shown} accepts results. The server is MLflow {server}, the client here {client}"
    if _release(server) < _release(client):  # different patch versions are compatible
        fix = f"on the server: pip install mlflow=={client}; mlflow db upgrade DATABASE"
        return _warning("MLflow", f"{what}. The client may need a newer server", fix)
    return _ok("MLflow", what)


def _ask(uri: str, path: str) -> "requests.Response":
    """Send a GET request with MLflow's own client and credentials."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        answer: requests.Response = http_request(
            get_default_host_creds(uri), path, "GET", max_retries=0, timeout=_TIMEOUT_S, raise_on_status=False
        )
    except (MlflowException, OSError) as error:
        raise ResourceError(f"doesn't answer ({without_credentials_in(str(error)).splitlines()[0]})") from None
    return answer


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _list(labels: Sequence[str]) -> str:
    """Return up to three node names, and the number of further nodes."""
    more = len(labels) - 3
    return ", ".join(labels) if more <= 1 else f"{', '.join(labels[:3])} and {more} more"


def _amount(megabytes: int) -> str:
    """Format an amount of memory, e.g. "64 MiB" or "24 GiB"."""
    return f"{megabytes} MiB" if megabytes < 10_240 else f"{megabytes / 1024:,.0f} GiB"


def _ok(subject: str, what: str) -> CheckResult:
    return CheckResult(subject=subject, status="ok", what=what)


def _warning(subject: str, what: str, fix: str) -> CheckResult:
    return CheckResult(subject=subject, status="warning", what=what, fix=fix)


def _problem(subject: str, what: str, fix: str) -> CheckResult:
    return CheckResult(subject=subject, status="problem", what=what, fix=fix)
