"""Memory that a step frees stays with the process: counted in processes of their own, as it can't be undone."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

STEPS = """
import resource, sys
import torch
from pipeline import heap
from contextlib import nullcontext

def pages(count, size):  # as many as a step needs anew, of 4 KiB each
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.zeros(size // 4) for _ in range(count)]
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

kept = heap.kept() if sys.argv[1] != "without" else nullcontext()
huge = heap.huge_pages() if sys.argv[1] == "huge" else nullcontext()
with huge, kept:
    torch.zeros(1)
    first = resident()
    print(pages(150, 2**20), pages(2, 100 * 2**20), resident() - first)
print(resident() - first)
"""


def measure(how: str, **environment: str) -> tuple[int, int, int, int]:
    """Pages of a step with small tensors and of one with large ones; bytes that stay inside and afterwards."""
    before = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], env=before | environment, capture_output=True, text=True, check=True
    )
    small, large, inside, afterwards = map(int, done.stdout.split())
    return small, large, inside, afterwards


def test_small_tensors_need_no_new_pages() -> None:
    small, _, inside, afterwards = measure("kept")
    assert small < 100
    assert inside > 140 * 2**20
    assert afterwards < 20 * 2**20, "a notebook gets its memory back"


def test_without_it_they_do() -> None:
    """Else all of this is needless. How many pages small ones need depends on what else lies on the heap."""
    assert measure("without")[1] > 10_000


def test_large_tensors_have_huge_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has no huge pages")
    assert measure("huge")[1] < 5_000


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_what_a_user_has_set_stays(name: str) -> None:
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert measure("kept", **{name: value})[0] > 10_000
