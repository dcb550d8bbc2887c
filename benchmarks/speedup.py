"""Compare the speedup that `pipeline compare` reports with the one that a hand-written script has.

    python benchmarks/speedup.py [--rounds 5]

In each round, in turn: the bare script on one worker, `pipeline compare` (one process, two workers, and one process
with both cores), the bare script on two workers. Ratios are taken within a round. Writes results/speedup.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from pipeline.planning.resources import detect

HERE = Path(__file__).parent
EXPERIMENT = HERE.parent / "experiments" / "resnet.yaml"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = [measure() for _ in range(parser.parse_args().rounds)]
    columns = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    machine = detect()
    result = {
        "machine": f"{machine.processor}, {machine.summary}",
        "rounds": len(rounds),
        "what": "samples/s and ratios of experiments/resnet.yaml; each ratio is taken within a round",
        **{name: {"median": median(v), "low": min(v), "high": max(v)} for name, v in columns.items()},
    }
    (HERE / "results" / "speedup.json").write_text(json.dumps(result, indent=2) + "\n")
    print(result["machine"])
    for name, values in columns.items():
        print(f"{name:<32} {median(values):8.3f}   {min(values):.3f} to {max(values):.3f}")


def measure() -> dict[str, float]:
    """One round; the ratios are of medians of windows measured within a minute of each other."""
    bare_one = bare(1)
    ours_one, ours_two, reported = ours()
    bare_two = bare(2)
    return {
        "bare x 1, samples/s": bare_one,
        "pipeline single, samples/s": ours_one,
        "bare x 2, samples/s": bare_two,
        "pipeline ddp x 2, samples/s": ours_two,
        "speedup of the bare script": bare_two / bare_one,
        "speedup that pipeline reports": reported,
        "reported / bare speedup": reported / (bare_two / bare_one),
        "pipeline / bare on 1 worker": ours_one / bare_one,
        "pipeline / bare on 2 workers": ours_two / bare_two,
    }


def bare(workers: int) -> float:
    """Throughput of the hand-written script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run([*command, HERE / "bare_ddp.py"], capture_output=True, text=True, check=True)
    return median(json.loads(done.stdout))


def ours() -> tuple[float, float, float]:
    """Throughput of one process and of two workers, and the speedup as it is reported."""
    wishes = ["--strategies", "single,ddp", "--workers", "2", "--repeats", "1", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline", "compare", EXPERIMENT, "parallel.launcher=torchrun", *wishes]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    cells = {cell["title"]: cell for cell in json.loads(done.stdout)["cells"]}
    one, two = cells["single"], cells["ddp x 2"]
    return one["samples_per_second"], two["samples_per_second"], two["speedup"]


if __name__ == "__main__":
    main()
