"""Memory that a step frees stays with the process: counted in processes of their own, as it can't be undone."""

# promise: data larger than memory: memory stays flat over an epoch; what the allocator keeps

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

STEPS = """
import os, resource, sys
import torch
from pipeline import system
from contextlib import nullcontext

def pages(count, size):  # of 4 KiB, new in a step; the least of five, as a system short of memory takes pages back
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.zeros(size // 4) for _ in range(count)]
        del activations
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def measure(how):
    kept = system.keep_freed_memory() if how != "without" else nullcontext()
    huge = system.huge_pages() if how == "huge" else nullcontext()
    with huge, kept:
        torch.zeros(1)
        first = resident()
        found = [pages(150, 2**20), pages(2, 100 * 2**20), resident() - first]
    print(*found, resident() - first, flush=True)

for how in sys.argv[1:]:  # each in a process of its own: what is done can't be undone
    if not os.fork():
        measure(how)
        os._exit(0)
    os.wait()
"""


class Measured(NamedTuple):
    small: int  # Pages of a step with small tensors
    large: int
    inside: int  # Bytes that stay while training lasts
    afterwards: int


def measure(*hows: str, **environment: str) -> dict[str, Measured]:
    """What was found in each way, by its name."""
    before = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *hows], env=before | environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    return {how: Measured(*map(int, line.split())) for how, line in zip(hows, lines, strict=True)}


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    return measure("kept", "without", "huge")


def test_small_tensors_need_no_new_pages(measured: dict[str, Measured]) -> None:
    kept = measured["kept"]
    assert kept.small < 100
    assert kept.inside > 140 * 2**20
    assert kept.afterwards < 20 * 2**20, "a notebook gets its memory back"


def test_without_it_they_do(measured: dict[str, Measured]) -> None:
    """Else all of this is needless. How many pages small ones need depends on what else lies on the heap."""
    assert measured["without"].large > 10_000


def test_large_tensors_have_huge_pages(measured: dict[str, Measured]) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has no huge pages")
    assert measured["huge"].large < 5_000


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_what_a_user_has_set_stays(name: str) -> None:
    value = "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072"
    assert measure("kept", **{name: value})["kept"].small > 10_000
