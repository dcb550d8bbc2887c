"""What a machine offers, as this process may use it."""

import os
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from pipeline import system
from pipeline.launch import node_facts
from pipeline.launch.node_facts import facts_here
from pipeline.plan import resources as machine
from pipeline.plan.resources import Resources, detect


def test_this_machine() -> None:
    here = detect()
    assert 1 <= here.cpus <= (os.cpu_count() or 1)
    assert 0 < here.memory_mb <= psutil.virtual_memory().total // 2**20
    assert here.node == os.uname().nodename
    assert here.nodes == 1


def test_the_memory_of_a_container_is_its_smallest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of the job; its step has a larger one, and the machine none. Cached files don't count as used."""
    step, stat = tmp_path / "slurm" / "job_7" / "step_0", "anon 900\nactive_file 20\ninactive_file 80"
    step.mkdir(parents=True)
    for group, limit in ((step, 3 * 2**20), (step.parent, 2 * 2**20), (step.parent.parent, "max")):
        for name, value in {"max": limit, "current": 1100, "stat": stat}.items():
            (group / f"memory.{name}").write_text(f"{value}\n")
    (tmp_path / "own").write_text("4:memory:/other\n0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(system, "_GROUPS", tmp_path)
    monkeypatch.setattr(system, "_OWN_GROUP", tmp_path / "own")

    assert system.find_memory_limits() == [(3 * 2**20, 3 * 2**20 - 1000), (2 * 2**20, 2 * 2**20 - 1000)]
    assert detect().memory_mb == 2


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: Any) -> None:
    """Let the Python code that a module would start as a process run in this one."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        exec(command[-1], {})
        return subprocess.CompletedProcess(command, 0, stdout=capsys.readouterr().out)

    monkeypatch.setattr(module.subprocess, "run", run)


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch, *, broken: Collection[object] = (), is_partitioned: bool = False
) -> None:
    """Four GPUs, of which NVML can't open the broken ones, or can't count them."""

    def opened(index: object) -> object:
        if index in broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return index

    fakes: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len([opened("count")] * 4),
        "nvmlDeviceGetHandleByIndex": opened,
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}ab-cd",
        "nvmlDeviceGetName": lambda index: f"H100 {index}",
        "nvmlDeviceGetMigMode": lambda _: [int(is_partitioned), 0],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)


@pytest.mark.parametrize(
    ("visible", "broken", "numbers"),
    [
        (None, {}, "0123"),
        (None, {2}, "013"),
        (None, {"count"}, ""),
        ("2", {1}, "3"),  # CUDA doesn't count what it can't open
        ("", {}, ""),
        ("2,0", {}, "20"),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(
    visible: str | None, broken: Collection[object], numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(monkeypatch, broken=broken)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect().gpus == tuple(f"H100 {number}" for number in numbers)


@pytest.mark.parametrize(
    ("visible", "is_partitioned"),
    [("MIG-33b0", True), ("0", True), ("GPU-1ab", False), ("0,-1,1", False), ("0,9", False), ("1,1", False)],
)
def test_cuda_is_asked_for_what_indices_do_not_say(
    visible: str, is_partitioned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = SimpleNamespace(uuid="12-34", name="H100 1g.10gb")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", [instance].__getitem__)

    run_here(monkeypatch, capsys, machine)
    fake_nvml(monkeypatch, is_partitioned=is_partitioned)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpus() == {"GPU-12-34": "H100 1g.10gb"}


@pytest.mark.parametrize(
    ("resources", "summary"),
    [
        (Resources(cpus=1, memory_mb=1024), "1 core, 1 GiB, no GPU"),
        (Resources(cpus=2, memory_mb=24 * 1024 - 100), "2 cores, 24 GiB, no GPU"),
        (Resources(cpus=16, memory_mb=131072, gpus=("H200", "H200")), "16 cores, 128 GiB, 2 x H200"),
        (Resources(cpus=1, memory_mb=0, gpus=("H200", "A10", "H200")), "1 core, 0 GiB, 2 x H200 + 1 x A10"),
    ],
)
def test_the_summary(resources: Resources, summary: str) -> None:
    assert resources.summary == summary


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("3,2", 3), ("", None), ("many", None)])
def test_omp_num_threads_is_read(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert detect().threads == threads


# What a node has, for pipeline doctor


def test_cores_and_memory_are_those_that_the_plan_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "_ask_torch", lambda *_, has_gpus: None)
    monkeypatch.setattr(node_facts, "find_memory_limits", lambda: [system.MemoryLimit(2**30, free=2**29)])
    facts, detected = facts_here(), detect()
    assert (facts.cpus, facts.memory_mb) == (detected.cpus, detected.memory_mb)
    assert facts.memory_free_mb == 512
    assert facts.node == detected.node == facts.label


def test_gpus_are_what_the_driver_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(index: int) -> SimpleNamespace:
        if index == 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=143_771 * 2**20)

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    fake_nvml(monkeypatch, broken={0, 1})
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", size)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "570.86")
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: 12080)
    monkeypatch.setattr(node_facts, "_ask_torch", lambda *_, has_gpus: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert facts_here().gpus == ()
    there = facts_here(all_gpus=True)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    broken = facts_here(all_gpus=True)

    assert [(gpu.name, gpu.memory_mb) for gpu in there.gpus] == [("H100 2", 143_771), ("H100 3", 0)]
    assert (there.driver, there.driver_cuda, there.gpu_error) == ("570.86", "12.8", None)
    assert (broken.gpus, broken.gpu_error) == ((), "RM has detected an NVML/RM version mismatch.")


VERSIONS = '{"version": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}\n'


@pytest.mark.parametrize(
    ("printed", "errors", "facts"),
    [
        (VERSIONS + '{"cuda_available": true, "cuda_devices": 1, "cuda_error": null}\n', "", (True, 1, None)),
        (VERSIONS, "Traceback\nRuntimeError: no device\n", (False, 0, "RuntimeError: no device")),
        (VERSIONS, "", (False, 0, "it crashed")),
    ],
)
def test_torch_tries_cuda_in_a_process_of_its_own(
    printed: str, errors: str, facts: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], 0, stdout=printed, stderr=errors)
    monkeypatch.setattr(node_facts.subprocess, "run", lambda *_, **__: ended)
    found = node_facts._ask_torch({}, has_gpus=True)
    assert found is not None
    assert (found.cuda_available, found.cuda_devices, found.cuda_error) == facts
    assert (found.cuda, found.nccl) == ("13.0", "2.28.9")


# What a step frees is there for the next one


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("given", ["0", None])
def test_huge_pages_are_asked_for_unless_the_user_decided_and_the_environment_is_put_back(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given)
    with system.huge_pages():
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == (given or "1")
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == given
