"""What a machine offers, as this process may use it."""

import os

import psutil
import pytest

from pipeline.planning.resources import Resources, detect


def test_this_machine() -> None:
    here = detect()
    assert 1 <= here.cpus <= (os.cpu_count() or 1)
    assert here.memory_mb == psutil.virtual_memory().total // 2**20
    assert here.node == os.uname().nodename
    assert here.nodes == 1


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().gpus == ()


@pytest.mark.parametrize(
    ("resources", "summary"),
    [
        (Resources(cpus=1, memory_mb=1024), "1 core, 1 GiB, no GPU"),
        (Resources(cpus=2, memory_mb=24 * 1024 - 100), "2 cores, 24 GiB, no GPU"),
        (Resources(cpus=16, memory_mb=131072, gpus=("H200", "H200")), "16 cores, 128 GiB, 2 x H200"),
    ],
)
def test_the_summary(resources: Resources, summary: str) -> None:
    assert resources.summary == summary
