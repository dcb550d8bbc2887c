"""The same work through pipeline, by hand, and through other libraries, in turn.

    python benchmarks/peers                                  # as many rounds as fit into 14 minutes, five at most
    python benchmarks/peers --rounds 1 --workloads mlp       # a part of it
    python benchmarks/peers --only "bare*" "pipeline*"       # without the other libraries
    python benchmarks/peers --taken 1                        # while another process computes on a core
    python benchmarks/peers --page                           # only the page, from the figures there are

The other libraries are the optional dependencies "bench". Writes results/peers.json and results/peers.md, with
``--taken`` peers_taken.json and peers_taken.md. Ends with 1 if a competitor trained something else than the others.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
from competitors import INPROCESS, Competitor, Row, rows
from page import Results, different, page
from race import ONE_THREAD, Run, race
from workloads import WORKLOADS

from pipeline.plan.resources import detect

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("torch", "ray", "mlflow", "lightning", "accelerate", "transformers")
QUIET = 0.1


def main() -> int:
    """Measure, write, print."""
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / ("peers_taken.json" if arguments.taken else "peers.json")
    if not arguments.page:
        todo = rows(arguments.workloads, everyone=arguments.everyone)
        chosen = [row for row in todo if any(fnmatch(row[0].name, pattern) for pattern in arguments.only)]
        measured = measure(chosen, rounds=arguments.rounds, minutes=arguments.minutes, taken=arguments.taken)
        file.write_text(measured.model_dump_json(indent=1) + "\n")
    results = Results.model_validate_json(file.read_text())
    file.with_suffix(".md").write_text(page(results))
    print(page(results))
    if max(results.busy) > QUIET:
        print(f"the machine was busy: other processes took {max(results.busy):.0%} of it")
    if others := different(results):
        print(f"not the same work: {', '.join(others)}")
    return 1 if others else 0


def measure(todo: list[Row], *, rounds: int, minutes: float, taken: int = 0) -> Results:
    """Measure as many rounds as fit, at least one, each second one in reverse order.

    Args:
        todo: competitors with their workloads and numbers of workers, in the order of the first round.
        rounds: most rounds.
        minutes: no round is begun that would end later.
        taken: processes that compute meanwhile.
    """
    begin, longest = time.monotonic(), 0.0
    machine = detect()
    results = Results(
        machine=f"{machine.processor}, {machine.summary}",
        versions={name: version(name) for name in LIBRARIES if find_spec(name)},
        rounds=0,
        busy=[],
        taken=taken,
        runs=[],
    )
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        _create_store(base)
        while results.rounds < rounds and time.monotonic() - begin + longest < 60 * minutes:
            started = time.monotonic()
            results.busy.append(psutil.cpu_percent(interval=2.0) / 100)
            with computing(taken):
                for competitor, workload, workers in todo[:: -1 if results.rounds % 2 else 1]:
                    begun = time.monotonic()
                    run = _raced(competitor, workload, workers=workers, number=results.rounds, base=base)
                    results.runs.append(run)
                    speed = f"{run.throughput:10.1f} samples/s {time.monotonic() - begun:5.1f} s in all"
                    print(f"{workload} x {workers}  {competitor.name:<32} {speed}", flush=True)
            results.rounds += 1
            longest = max(longest, time.monotonic() - started)
    order = {(competitor.name, workload, workers): i for i, (competitor, workload, workers) in enumerate(todo)}
    results.runs.sort(key=lambda run: (order[run.competitor, run.workload, run.workers], run.round))
    return results


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """Run processes that compute, as those of others on a shared machine do, until the block or this process ends."""
    compute = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"
    others = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def _raced(competitor: Competitor, workload: str, *, workers: int, number: int, base: Path) -> Run:
    """A run, done again if it failed: now and then torch 2.13 aborts a process of DDP at its very end, with gloo."""
    try:
        return race(competitor, workload, workers=workers, number=number, base=base)
    except RuntimeError as error:
        print(f"{workload} x {workers}  {competitor.name} failed and is started again: {str(error)[:500]}", flush=True)
        return race(competitor, workload, workers=workers, number=number, base=base)


def _create_store(base: Path) -> None:
    """MLflow's database, whose first creation takes long, once for all runs."""
    folder = base / "first"
    folder.mkdir()
    command = [*INPROCESS.command("resnet", workers=1, folder=folder), "train.epochs=1", "model.width=1"]
    subprocess.run(
        command, cwd=folder, env={**os.environ, **ONE_THREAD, **INPROCESS.environment}, check=True, capture_output=True
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--minutes", type=float, default=14, help="no round is begun that would end later")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=["*"], help='competitors, e.g. "pipeline*"')
    parser.add_argument(
        "--taken", type=int, default=0, metavar="CORES", help="on which other processes compute meanwhile"
    )
    parser.add_argument("--everyone", action="store_true", help="all competitors in every workload, not only in mlp")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
