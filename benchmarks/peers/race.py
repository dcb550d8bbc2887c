"""One run of one competitor: started, watched and read."""

import itertools
import os
import subprocess
import threading
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from competitors import Competitor
from pydantic import BaseModel
from workloads import WORKLOADS, build

_SAMPLE_S = 1.0
_SAMPLES_FOR_PSS = 3  # samples between two readings of PSS, for which the kernel walks a process's page tables
_PATIENCE_S = 600
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Run(BaseModel):
    """What one competitor did in one round."""

    competitor: str
    workload: str
    workers: int
    round: int
    samples_per_second: list[float]
    """Of each epoch but the first."""
    step_ms: float
    """Median over these epochs."""
    first_step_s: float
    """From the start of the command to the end of the first optimizer step."""
    worker_peak_mb: float
    """Resident memory of the largest worker."""
    all_peak_mb: float
    """Sum over all processes of the run, seen once a second; shared pages count once for each."""
    all_peak_pss_mb: float | None = None
    """The same as proportional set size, in which a shared page counts once; seen every three seconds."""
    prompt_s: float | None = None
    """From the start of the command to its end."""
    losses: list[float]
    """Of the first steps and of the last one."""

    @property
    def throughput(self) -> float:
        """Median over the epochs, samples/s."""
        return median(self.samples_per_second)


def race(competitor: Competitor, workload: str, *, workers: int, number: int, base: Path) -> Run:
    """Do one run.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    with TemporaryDirectory(dir=base) as name:
        folder = Path(name)
        command = competitor.command(workload, workers=workers, folder=folder)
        watched = _watched(command, folder=folder, environment={**ONE_THREAD, **competitor.environment})
        result = competitor.result(workload, folder=folder)
    samples = len(build(WORKLOADS[workload].data)[0])
    seconds = [end - begin for begin, end in zip(result.epochs, result.epochs[1:], strict=False)]
    steps = samples // WORKLOADS[workload].batch
    if len(result.losses) != steps * WORKLOADS[workload].epochs or len(seconds) != WORKLOADS[workload].epochs - 1:
        raise RuntimeError(f"{competitor.name}: {len(result.losses)} losses, {len(seconds)} windows")
    return Run(
        competitor=competitor.name,
        workload=workload,
        workers=workers,
        round=number,
        samples_per_second=[samples / each for each in seconds],
        step_ms=1e3 * median(seconds) / steps,
        first_step_s=result.first_step - watched.started,
        worker_peak_mb=result.worker_peak_mb,
        all_peak_mb=watched.peak_mb["rss"],
        all_peak_pss_mb=watched.peak_mb["pss"] or None,
        prompt_s=watched.ended - watched.started,
        losses=[*result.losses[:20], result.losses[-1]],
    )


class _Watched(NamedTuple):
    """A command as it is seen from outside."""

    started: float
    """In seconds since 1970, as is the next."""
    ended: float
    peak_mb: dict[str, float]
    """Largest sum over its processes in MiB, of resident ("rss") and of proportional memory ("pss")."""


def _watched(command: list[str], *, folder: Path, environment: dict[str, str]) -> _Watched:
    log = folder / "log.txt"
    with log.open("w") as file:
        started = time.time()
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT
        )
        peaks = {"rss": 0.0, "pss": 0.0}
        done = threading.Event()
        watcher = threading.Thread(target=_sample, args=(process.pid, done, peaks))
        watcher.start()
        try:
            code = process.wait(timeout=_PATIENCE_S)
            ended = time.time()
        finally:
            done.set()
            watcher.join()
            if process.poll() is None:
                process.kill()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-3000:]}")
    return _Watched(started, ended, peaks)


def _sample(pid: int, done: threading.Event, peaks: dict[str, float]) -> None:
    for number in itertools.count(1):
        if done.wait(_SAMPLE_S):
            return
        kinds = peaks if number % _SAMPLES_FOR_PSS == 0 else ("rss",)
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        for kind in kinds:
            peaks[kind] = max(peaks[kind], sum(_memory(each, kind) for each in family) / 2**20)


def _memory(process: psutil.Process, kind: str) -> int:
    try:
        size: int = getattr(process.memory_full_info() if kind == "pss" else process.memory_info(), kind)
    except psutil.Error:  # it has just ended
        return 0
    return size
