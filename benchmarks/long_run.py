"""Memory of a run of 200,000 steps, at its start and at its end.

    python benchmarks/long_run.py                    # some minutes
    python benchmarks/long_run.py --steps 5000       # a part of it

`pipeline run` trains a small network in one process, with event log, terminal output and MLflow. The memory of all its
processes is read every second. The last twentieth of the readings (the result) is left out. The first tenth of the run
has the imports of the start, so the last tenth is compared with the second one.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from measure import RESULTS, ROOT, machine, run, table, write

STEPS, POINTS = 200_000, 10
SMALL = (
    *("parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1", "parallel.cpus_per_worker=1"),
    *("model.hidden=[8]", "train.global_batch_size=8", "tracking.log_model=false", "train.epochs=null"),
    *("train.evaluate_every_epochs=100", "checkpoint.keep=0"),
)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pipeline", "run", ROOT / "experiments" / "mlp.yaml", "--train-only", *SMALL]
    with tempfile.TemporaryDirectory() as folder:
        ended = run([*command, f"train.steps={arguments.steps}"], folder=Path(folder), sample=1.0)
    kept = ended.memory_mib[: len(ended.memory_mib) * 19 // 20]
    size = max(1, len(kept) // POINTS)
    parts = [median(kept[first : first + size]) for first in range(0, size * POINTS, size)][:POINTS]
    growth = parts[-1] / parts[1] - 1
    rows = [["MiB", *(f"{value:,.0f}" for value in parts)]]
    tenths = [f"{number} to {number + 10}%" for number in range(0, 10 * POINTS, 10)]
    text = "\n\n".join(
        [
            f"{machine()}. {arguments.steps:,} steps in {ended.seconds:,.0f} s. Proportional memory of all processes, "
            f"median of each tenth of the run: {growth:+.1%} from the second to the last.",
            table(["part of the run", *tenths], rows),
        ]
    )
    write("long_run", {"machine": machine(), "steps": arguments.steps, "mib": parts}, text, out=arguments.out)


if __name__ == "__main__":
    main()
