"""Where the time from a command to its first optimizer step goes, for each launcher.

    python benchmarks/first_step.py [--rounds 3] [--workers 1]
    python benchmarks/first_step.py --rounds 5 --workers 2 --launchers torchrun ray

Runs a small MLP with each launcher in turn. The stamps: when the
command was given; when the kernel started the worker's process; the events of the journal; and this module's own data
and model, which write down when they are called. Writes results/first_step.json and .md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from torch import nn
from torch.utils.data import Dataset

from pipeline.data import digits
from pipeline.models import MLP
from pipeline.plan.resources import detect
from pipeline.protocol.events import FirstStep, RunOpened, Started, TrialOpened
from pipeline.record import journal

HERE = Path(__file__).parent
_STAMPS = "FIRST_STEP_STAMPS"
LAUNCHERS = ("inprocess", "torchrun", "ray")
PARTS = {
    "driver: start, imports, checks": ("command", "run opened"),
    "driver: recording, launcher's imports": ("run opened", "trial opened"),
    "launcher: until rank 0's process is there": ("trial opened", "process"),
    "rank 0: imports, placement, process group": ("process", "data begins"),
    "rank 0: data": ("data begins", "data ends"),
    "rank 0: loader, strategy, model": ("data ends", "model ends"),
    "rank 0: wrapping, optimizer, all ranks ready": ("model ends", "started"),
    "rank 0: first step": ("started", "first step"),
}
"""From one stamp to the next, in order; they add up to the whole."""


def stamped_data() -> tuple[Dataset[Any], None]:
    """The digits; writes down when it was called, and by which process."""
    begin = time.time()
    data = digits(validation_fraction=0).train
    _stamp({"data begins": begin, "data ends": time.time(), "process": psutil.Process().create_time()})
    return data, None


def stamped_model() -> nn.Module:
    """A small network; writes down when it was there."""
    model = MLP(64, hidden=[64, 64], num_classes=10)
    _stamp({"model ends": time.time()})
    return model


def _stamp(times: dict[str, float]) -> None:
    if os.environ.get("RANK", "0") == "0":
        with Path(os.environ[_STAMPS]).open("a") as file:
            file.write(json.dumps(times) + "\n")


def main() -> None:
    """Run all launchers in turn, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {launcher: [] for launcher in arguments.launchers}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):  # the first one creates the store and fills the file cache
            for launcher, parts in runs.items():
                if arguments.workers > 1 and launcher == "inprocess":
                    continue
                taken = run(launcher, workers=arguments.workers, folder=Path(folder) / f"{number}-{launcher}")
                parts += [taken] if number else []
    machine = detect()
    result = {"machine": f"{machine.processor}, {machine.summary}", "workers": arguments.workers, "seconds": runs}
    (arguments.out / "first_step.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "first_step.md").write_text(page(result))
    print(page(result))


def run(launcher: str, *, workers: int, folder: Path) -> dict[str, float]:
    """Seconds of each part of one run."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["first_step"]\n')
    stamps = folder / "stamps.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(HERE), _STAMPS: str(stamps)}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(_experiment(launcher, workers)))
    command = [sys.executable, "-m", "pipeline", "run", "experiment.yaml", "--no-baseline"]
    begin = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{launcher} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (path,) = folder.glob(f"runs/*/{journal.FILE_NAME}")
    names = {RunOpened: "run opened", TrialOpened: "trial opened", Started: "started", FirstStep: "first step"}
    times = {"command": begin}
    for line in stamps.read_text().splitlines():
        times |= json.loads(line)
    times |= {names[type(event)]: event.time for event in journal.read(path) if type(event) in names}
    # In its own process, a launcher starts none; and Ray's workers may wait from before the trial.
    times["process"] = max(times["process"], times["trial opened"])
    return {part: times[end] - times[start] for part, (start, end) in PARTS.items()}


def _experiment(launcher: str, workers: int) -> dict[str, Any]:
    return {
        "name": "first-step",
        "model": {"_target_": "first_step.stamped_model"},
        "data": {"_target_": "first_step.stamped_data"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "train": {"epochs": 1, "global_batch_size": 64},
        "checkpoint": {"keep": 0},
        "parallel": {
            "launcher": launcher,
            "workers": workers,
            "strategy": "ddp" if workers > 1 else "single",
            "cpus_per_worker": 1,
        },
        "tracking": {"uri": "sqlite:///../mlflow.db", "log_model": False},
    }


def page(result: dict[str, Any]) -> str:
    """A table in Markdown: medians over the rounds."""
    there = {launcher: parts for launcher, parts in result["seconds"].items() if parts}
    lines = [
        f"# From the command to the first step, {result['workers']} worker(s)",
        "",
        f"{result['machine']}. Seconds, median of {min(map(len, there.values()))} rounds.",
        "",
        f"| | {' | '.join(there)} |",
        f"|---|{'--:|' * len(there)}",
    ]
    for part in PARTS:
        cells = (f"{median(one[part] for one in parts):.2f}" for parts in there.values())
        lines.append(f"| {part} | {' | '.join(cells)} |")
    totals = (f"{median(sum(one.values()) for one in parts):.2f}" for parts in there.values())
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"]) + "\n"


if __name__ == "__main__":
    main()
