"""What the doctor makes of what nodes have."""

import io

import pytest
import rich.console

from pipeline.commands.doctor import CheckResult, Examination, check_nodes, show
from pipeline.launch.node_facts import Gpu, NodeFacts, Torch

HERE = NodeFacts(
    node="a", python="3.11.7", ray="2.60.0", mlflow="3.17.2", pipeline="0.1.0",
    torch=Torch(version="2.13.0+cpu", cuda=None, nccl=None, cuda_available=None, cuda_error=None),
    gpus=(), driver=None, driver_cuda=None, gpu_error=None,
    cpus=2, memory_mb=24_000, memory_free_mb=20_000, shared_memory_mb=4096, shared_memory_free_mb=4096,
)  # fmt: skip
WITH_CUDA = Torch(
    version="2.13.0+cu130", cuda="13.0", nccl="2.28.9", cuda_available=True, cuda_error=None, cuda_devices=2
)
GPUS = {"gpus": (Gpu(name="NVIDIA H200", memory_mb=143_771),) * 2, "driver": "580.1", "driver_cuda": "13.0"}


def node(**facts: object) -> NodeFacts:
    return NodeFacts.model_validate(HERE.model_dump() | facts)


def judged(*nodes_: NodeFacts) -> list[CheckResult]:
    return list(check_nodes(nodes_, here=HERE))


def bad(*nodes_: NodeFacts) -> CheckResult:
    (finding,) = [finding for finding in judged(*nodes_) if finding.status != "ok"]
    assert finding.fix
    return finding


def cuda(**facts: object) -> dict[str, object]:
    """Facts of a node with GPUs and a torch that is built for them."""
    return {"torch": WITH_CUDA, **GPUS, **facts}


def test_a_node_that_has_everything_has_no_fault_and_one_that_does_not_answer_nothing_to_check() -> None:
    assert judged() == []
    assert {finding.status for finding in judged(HERE)} == {"ok"}
    assert {finding.status for finding in judged(node(**cuda()))} == {"ok"}  # its build may differ


UNKNOWN = WITH_CUDA.model_copy(update={"cuda_available": False, "cuda_error": "RuntimeError: CUDA unknown error"})
OLD = {"driver": "550.54", "driver_cuda": "12.4"}


@pytest.mark.parametrize(
    ("facts", "status", "said", "fix"),
    [
        ({"shared_memory_mb": 64, "shared_memory_free_mb": 60}, "warning", "60 MiB of 64 MiB are free",
         "--shm-size=2g"),
        ({"shared_memory_free_mb": 4}, "warning", "4 MiB of 4096 MiB are free in /dev/shm", "/dev/shm"),
        ({"torch": None}, "problem", "a has no torch, and this machine has 2.13.0", "pip install torch==2.13.0"),
        ({"python": "3.12.1"}, "problem", "a has Python 3.12, and this machine has 3.", "use Python 3."),
        ({"gpu_error": "Driver/library version mismatch"}, "problem", "Driver/library version mismatch", "nvidia-smi"),
        (GPUS, "problem", "2 x NVIDIA H200, but torch 2.13.0+cpu is built for CPUs only", "pip install torch==2.13.0"),
        (cuda(**OLD), "problem", "driver 550.54 supports CUDA up to 12.4. torch 2.13.0+cu130 needs 13.0", ""),
        (cuda(torch=UNKNOWN), "problem", "CUDA unknown error", ""),
    ],
)  # fmt: skip
def test_what_is_lacking_is_said_with_what_mends_it(facts: dict[str, object], status: str, said: str, fix: str) -> None:
    finding = bad(node(**facts))
    assert finding.status == status
    assert said in finding.what
    assert fix in finding.fix


def test_of_several_nodes_those_that_differ_are_named() -> None:
    other = Torch(version="2.12.1+cpu", cuda=None, nccl=None, cuda_available=None, cuda_error=None)
    same, another = node(address="10.0.0.2"), node(address="10.0.0.3", torch=other.model_dump())
    finding = bad(same, another)
    assert finding.status == "problem"
    assert finding.what == "a (10.0.0.3) has torch 2.12.1, and this machine has 2.13.0"
    assert finding.fix == "on a (10.0.0.3): pip install torch==2.13.0"
    # What many nodes lack is said once.
    finding = bad(*(node(address=f"10.0.0.{i}", pipeline=None) for i in range(2, 8)))
    assert finding.what.startswith("a (10.0.0.2), a (10.0.0.3), a (10.0.0.4) and 3 more have no ddp-pipeline")


def test_gpus_that_cuda_does_not_show_are_counted() -> None:
    there = node(torch=WITH_CUDA.model_copy(update={"cuda_devices": 1}), **GPUS)
    (gpus,) = [finding for finding in judged(there) if finding.subject == "GPUs"]
    assert gpus.what == "2 x NVIDIA H200. CUDA shows 1. Check CUDA_VISIBLE_DEVICES and MIG"


def test_the_last_line_counts_the_checks_that_passed() -> None:
    findings = tuple(CheckResult(subject=subject, status="ok", what="fine") for subject in ("git", "disk", "MLflow"))
    console = rich.console.Console(file=io.StringIO(), width=80, color_system=None)
    show(Examination(address=None, nodes=(HERE,), findings=findings), terminal=console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\nAll 3 checks passed.\n")


def test_the_page_fits_80_columns_and_commands_stay_whole() -> None:
    findings = tuple(judged(node(shared_memory_mb=64, **GPUS)))
    examination = Examination(address=None, nodes=(HERE, node(**GPUS)), findings=findings)
    terminal = rich.console.Console(file=io.StringIO(), width=80, color_system=None)
    show(examination, terminal=terminal)
    assert isinstance(terminal.file, io.StringIO)
    lines = terminal.file.getvalue().splitlines()
    fixes = [line.strip().removeprefix("fix: ") for line in lines if line.strip().startswith("fix: ")]
    assert fixes == [finding.fix for finding in findings if finding.fix]
    assert all(len(line) <= 80 for line in lines if "fix: " not in line)
    checks = len({finding.subject for finding in findings})
    assert lines[-1] == f"1 problem and 1 warning. {checks - 2} of {checks} checks passed."
    assert "NVIDIA H200" in terminal.file.getvalue()
