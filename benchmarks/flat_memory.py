"""Memory of a process over an epoch of data ten times larger than all that it may use.

    python benchmarks/flat_memory.py            # a minute; needs no room on the disk

Each kind of data is read by a process of its own as training reads it: in batches, in the order of an epoch. The
process has a limit for memory of its own (RLIMIT_DATA: what is private and can be written to, whether touched or not).
Pages of mapped files are the system's, which takes them back when it needs them; they are counted apart. "loaded"
reads the same array into memory, to show that the limit is one.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.data import Splits, arrays, tokens
from pipeline.experiment.schema import Loader
from pipeline.train.loader import BatchLoader
from pipeline.train.order import SampleOrder
from pipeline.train.reader import Collation

LIMIT_MB, DATA_MB = 320, 3200
KINDS = ("arrays", "tokens", "loaded")
_MB = 2**20
_ROW = 64 * 1024  # bytes
_READINGS = 100


def make(kind: str, folder: Path, *, data_mb: int) -> None:
    """Write data; arrays and tokens are zeros, which need no room on the disk."""
    rows = data_mb * _MB // _ROW
    if kind == "tokens":
        with (folder / "train.bin").open("wb") as file:
            file.truncate(data_mb * _MB + 2)
    else:
        np.lib.format.open_memmap(folder / "inputs.npy", mode="w+", dtype=np.float32, shape=(rows, _ROW // 4)).flush()
        np.save(folder / "targets.npy", np.arange(rows))


def data(kind: str, folder: Path) -> Splits:
    """The data as an experiment declares it."""
    if kind == "tokens":
        return tokens(train=f"{folder}/train.bin", length=_ROW // 2)
    return arrays(inputs=f"{folder}/inputs.npy", targets=f"{folder}/targets.npy")


def limit_memory(limit_mb: float) -> None:
    """Let this process have so much memory of its own, and no more."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_mb * _MB),) * 2)


def read_epoch(kind: str, folder: Path) -> dict[str, Any]:
    """Read an epoch; readings of memory in MB after each hundredth of it, and how much was read."""
    if kind == "loaded":
        np.load(folder / "inputs.npy")
    dataset: Any = data(kind, folder).train
    size = len(dataset)
    loader = BatchLoader(
        dataset, samples=size, options=Loader(), collate=Collation(), seed=0, device=torch.device("cpu")
    )
    order = SampleOrder(samples=size, set_size=size, global_batch_size=32, seed=0)
    readings, samples = list[dict[str, float]](), 0
    parts = (order.micro_batches(step, rank=0, world_size=1)[0] for step in range(order.steps_per_epoch))
    for step, (micro_batch, _) in enumerate(loader.batches(parts), start=1):
        samples += len(micro_batch.indices)
        if step * _READINGS // order.steps_per_epoch >= len(readings):
            readings.append(memory() | {"read": round(samples * _ROW / _MB, 1)})
    return {"samples": samples, "readings": readings}


def memory() -> dict[str, float]:
    """Of this process, in MB: its own pages, those of mapped files, and what RLIMIT_DATA counts."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {line[0]: round(float(line[1]) / 1024, 1) for line in lines if len(line) == 3 and line[2] == "kB"}
    return {"own": found["RssAnon:"], "mapped": found["RssFile:"], "data": found["VmData:"]}


def measure(kind: str) -> dict[str, Any]:
    """Have a process of its own read an epoch; its result, or the error that it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        make(kind, Path(folder), data_mb=DATA_MB)
        child = [sys.executable, __file__, kind, folder]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure all kinds, one after the other."""
    from measure import machine, table, write  # not in the process whose memory is limited

    results = {kind: measure(kind) for kind in KINDS}
    rows = []
    for kind, result in results.items():
        own = [reading["own"] for reading in result.get("readings", ())]
        ends = [f"{own[0]:,.0f}", f"{max(own):,.0f}", f"{own[-1]:,.0f}"] if own else [result["error"], "-", "-"]
        rows.append([kind, *ends])
    head = ["data", "MiB after the first batch", "MiB, at most", "MiB, at the end"]
    text = f"{machine()}. An epoch of {DATA_MB:,} MiB in a process limited to {LIMIT_MB} MiB.\n\n{table(head, rows)}"
    kept = [dict(zip(head, row, strict=True)) for row in rows]
    write("flat_memory", {"machine": machine(), "limit_mib": LIMIT_MB, "data_mib": DATA_MB, "kinds": kept}, text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        limit_memory(LIMIT_MB)
        print(json.dumps(read_epoch(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
