"""What a node has, asked where this package is missing."""

import subprocess

import pytest
import torch

from pipeline.launch import node_facts
from pipeline.launch.node_facts import facts_here
from pipeline.plan import resources


def test_cores_and_memory_are_those_that_the_plan_counts_on() -> None:
    facts, detected = facts_here(), resources.detect()

    assert facts.cpus == detected.cpus
    assert facts.memory_mb <= detected.memory_mb
    assert 0 < facts.memory_free_mb <= facts.memory_mb
    assert facts.node == detected.node == facts.label


def test_a_container_s_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"/sys/fs/cgroup/cpu.max": "150000 100000", "/sys/fs/cgroup/memory.max": str(2**30)}
    limits["/sys/fs/cgroup/memory.current"] = str(2**29)
    text = node_facts._text
    monkeypatch.setattr(node_facts, "_text", lambda path: limits.get(path) or text(path))

    facts = facts_here()

    assert (facts.cpus, facts.memory_mb, facts.memory_free_mb) == (1, 1024, 512)


def test_cuda_itself_counts_its_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        exec(command[-1], {})
        return subprocess.CompletedProcess(command, 0, stdout=capsys.readouterr().out)

    monkeypatch.setattr(node_facts.subprocess, "run", run)
    assert node_facts._try_cuda(all_gpus=False) == {"cuda_available": True, "cuda_devices": 1, "nccl": "2.28.9"}
