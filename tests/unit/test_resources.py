"""What a machine offers, as this process may use it."""

import os
import subprocess
import sys

import psutil
import pytest

from pipeline.resources import Resources, detect


def test_this_machine() -> None:
    here = detect()
    assert 1 <= here.cpus <= (os.cpu_count() or 1)
    assert here.memory_mb == psutil.virtual_memory().total // 2**20
    assert here.node == os.uname().nodename
    assert here.nodes == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_only_cores_that_the_process_may_use_count() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from pipeline.resources import detect; print(detect().cpus)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect().gpus == ()


def test_detection_does_not_load_torch() -> None:
    """A plan must not open a CUDA context, and ``pipeline run --dry-run`` shouldn't wait for torch for its machine."""
    code = "import sys; from pipeline.resources import detect; detect(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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
