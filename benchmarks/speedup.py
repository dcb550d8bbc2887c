"""Compare the speedup that `pipeline run` reports with the one that a hand-written script has.

    python benchmarks/speedup.py [--rounds 3]       # three minutes a round

In each round, in turn: `pipeline run` with one epoch, then pairs of the bare script on one worker and on two, in
alternating order. Both speedups have an interval from the same estimator. Writes results/speedup.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pipeline.plan.resources import detect
from pipeline.protocol.estimates import ratio

HERE = Path(__file__).parent
EXPERIMENT = HERE.parent / "experiments" / "resnet.yaml"
PAIRS = 5


class Speedup(NamedTuple):
    """A speedup with the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: "Speedup") -> bool:
        """Return True if the intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    machine, rounds = detect(), []
    print(f"{machine.processor}, {machine.summary}")
    for number in range(parser.parse_args().rounds):
        ours, script = reported(), by_hand()
        rounds.append({"reported": ours._asdict(), "script": script._asdict(), "overlap": ours.overlaps(script)})
        print(f"round {number + 1}: reported {told(ours)}, script {told(script)}", flush=True)
    overlapping = sum(bool(each["overlap"]) for each in rounds)
    print(f"the intervals overlap in {overlapping} of {len(rounds)} rounds")
    result = {
        "machine": f"{machine.processor}, {machine.summary}",
        "what": "speedup of two workers over one, experiments/resnet.yaml with torchrun, with 95% intervals",
        "overlapping": overlapping,
        "rounds": rounds,
    }
    (HERE / "results" / "speedup.json").write_text(json.dumps(result, indent=2) + "\n")


def told(speedup: Speedup) -> str:
    """Format a speedup with its interval."""
    return f"{speedup.value:.2f}x ({speedup.low:.2f}x to {speedup.high:.2f}x)"


def by_hand() -> Speedup:
    """Measure pairs of the hand-written script on one worker and on two."""
    pairs = []
    for index in range(PAIRS):
        rates = {workers: bare(workers) for workers in ((1, 2) if index % 2 == 0 else (2, 1))}
        pairs.append((rates[2], rates[1]))
    return Speedup(*ratio(pairs)[:3])


def bare(workers: int) -> float:
    """Return the throughput of the hand-written script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run([*command, HERE / "bare_ddp.py"], capture_output=True, text=True, check=True)
    return median(json.loads(done.stdout))


def reported() -> Speedup:
    """Return the speedup that a run reports."""
    wishes = ["parallel.launcher=torchrun", "train.epochs=1", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline", "run", EXPERIMENT, *wishes]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    facts = json.loads(done.stdout)["facts"]
    fact = next(fact for fact in facts if (fact["key"], fact["trial"]) == ("speedup", "main"))
    return Speedup(fact["value"], fact["low"], fact["high"])


if __name__ == "__main__":
    main()
