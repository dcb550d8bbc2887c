"""What the benchmarks share: interleaved rounds, ratios with intervals, watched processes, written results."""

import itertools
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import psutil
from scipy.stats import t

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STATUS = ROOT / "docs" / "status.md"
MIB = 2**20


class Ratio(NamedTuple):
    """A ratio with its 95% confidence interval; the interval is infinite after one round."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.value:.2f} (one round)"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the geometric mean of the ratios of pairs, with Student's t interval of their logarithms."""
    logs = [math.log(value / base) for value, base in pairs]
    half = math.inf
    if len(logs) > 1:
        half = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    center = fmean(logs)
    return Ratio(math.exp(center), math.exp(center - half), math.exp(center + half) if half < math.inf else math.inf)


def interleave(
    ways: Mapping[str, Callable[[], Any]], *, rounds: int, minutes: float = math.inf
) -> dict[str, list[Any]]:
    """Run each way once per round, in reverse order in every second round; start no round that would end too late."""
    start, longest = time.monotonic(), 0.0
    done: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(rounds):
        begin = time.monotonic()
        if number and begin - start + longest > 60 * minutes:
            break
        for name in list(ways)[:: -1 if number % 2 else 1]:
            started = time.monotonic()
            done[name].append(ways[name]())
            print(f"round {number + 1}  {name}  {time.monotonic() - started:.0f} s", flush=True)
        longest = max(longest, time.monotonic() - begin)
    return done


class Command(NamedTuple):
    """A command that has ended, as seen from outside."""

    started: float
    """In seconds since 1970."""
    seconds: float
    cpu_s: float
    """Processor time of its processes."""
    memory_mib: list[float]
    """Proportional memory (PSS) of its processes, in which a shared page counts once; every second."""


def run(
    command: Sequence[str | Path], *, folder: Path, environment: Mapping[str, str] | None = None, sample: float = 2.0
) -> Command:
    """Run a command in a folder, which gets its output in log.txt.

    Args:
        command: what to run.
        folder: where.
        environment: variables in addition to those of this process.
        sample: seconds between two readings of the memory.

    Raises:
        RuntimeError: the command failed.
    """
    readings: list[float] = []
    done = threading.Event()
    before = os.times()
    with (folder / "log.txt").open("w") as log:
        started = time.time()
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, env={**os.environ, **(environment or {})}, stdout=log, stderr=log
        )
        watcher = threading.Thread(target=_read_memory, args=(process.pid, done, readings, sample))
        watcher.start()
        try:
            code = process.wait()
            seconds = time.time() - started
        finally:
            done.set()
            watcher.join()
            if process.poll() is None:
                process.kill()
    if code:
        printed = (folder / "log.txt").read_text()[-3000:]
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {code}:\n{printed}")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Command(started, seconds, cpu_s, readings)


def _read_memory(pid: int, done: threading.Event, readings: list[float], sample: float) -> None:
    for _ in itertools.count():
        if done.wait(sample):
            return
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return
        readings.append(sum(map(_proportional_bytes, family)) / MIB)


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has just ended
        return 0


def machine() -> str:
    """Return the processor, its cores and the memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return f"{names[0] if names else 'CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB, {time.strftime('%Y-%m-%d')}"


def spread(values: Sequence[float], style: str = ",.1f") -> str:
    """Format the median with the lowest and the highest value."""
    middle, low, high = (format(value, style) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, result: Mapping[str, Any], text: str, *, out: Path = RESULTS) -> None:
    """Write NAME.json and NAME.md; into results/, also the block of docs/status.md that has the name."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(text + "\n")
    if out == RESULTS:
        update_block(f"benchmarks/{name}.py", text)
    print(text)


def update_block(name: str, text: str, *, page: Path = STATUS) -> None:
    """Replace the block between the marks of a page; leave a page without them as it is."""
    begin, end = f"<!-- begin: {name} -->\n", "<!-- end -->\n"
    head, found, rest = page.read_text().partition(begin)
    if found:
        page.write_text(f"{head}{begin}{text}\n{end}{rest.partition(end)[2]}")
