"""Time of `pipeline list` in a folder of 2,000 runs.

    python benchmarks/runs_list.py       # a minute

Trains one small run, copies its folder, and lists all of them several times.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

from measure import RESULTS, ROOT, interleave, machine, run, spread, table, write

RUNS, ROUNDS = 2000, 5
COMMAND = [sys.executable, "-m", "pipeline"]
SMALL = ("train.epochs=1", "parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([*COMMAND, "run", ROOT / "experiments" / "mlp.yaml", "--train-only", *SMALL], folder=folder)
        (first,) = (path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink())
        stem = first.name.rpartition("-")[0]
        for number in range(arguments.runs - 1):
            shutil.copytree(first, first.with_name(f"{stem}-{number:04x}"), dirs_exist_ok=True)
        ways = {
            "pipeline list": lambda: run([*COMMAND, "list"], folder=folder),
            "pipeline --version": lambda: run([*COMMAND, "--version"], folder=folder),
        }
        done = interleave(ways, rounds=arguments.rounds)
    rows = [[what, spread([one.seconds for one in of]), spread([one.cpu_s for one in of])] for what, of in done.items()]
    text = table([f"{arguments.runs:,} runs", "seconds", "CPU seconds"], rows)
    result = {what: {"seconds": median(one.seconds for one in of), "cpu_s": median(one.cpu_s for one in of)}
              for what, of in done.items()}  # fmt: skip
    write("runs_list", {"machine": machine(), "runs": arguments.runs, **result}, f"{machine()}.\n\n{text}",
          out=arguments.out)  # fmt: skip


if __name__ == "__main__":
    main()
