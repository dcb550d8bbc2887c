"""Ends of a run: what happens before the first step and after the last one, its first seconds, and who holds memory.

    python benchmarks/ends.py [--rounds 3] [--launchers inprocess torchrun ray]

Runs the experiments of `TRAININGS` in turn, with one worker in the command's process and with two workers under the
other launchers. The parts of both ends are between events of the journal; processor time is that of all processes that
have ended with the command. The proportional memory (PSS) of each process is read every half second, and shown for the
moment at which their sum was largest. The pace is that of the MLP. Writes results/ends.json and .md.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from pipeline.planning.resources import detect
from pipeline.protocol.events import AnyEvent, Finished, FirstStep, Metrics, RunClosed, RunOpened, Started, Trained
from pipeline.recording.journal import journal

HERE = Path(__file__).parent
LAUNCHERS = ("inprocess", "torchrun", "ray")
TRAININGS = {"mlp": 150, "resnet": 2, "gpt": 1}
"""Epochs of each experiment."""
PARTS = {
    "before: the driver's imports and checks": ("command", "RunOpened"),
    "before: workers, process group, model, data": ("RunOpened", "Started"),
    "before: the first step itself": ("Started", "FirstStep"),
    "after: checkpoint, weights, test set": ("last step", "Trained"),
    "after: the step taken apart, its operations, the model exported": ("Trained", "Finished"),
    "after: workers end, report and pictures": ("Finished", "RunClosed"),
    "after: the rest to MLflow, the command ends": ("RunClosed", "prompt"),
}
_STAMPED = (RunOpened, Started, FirstStep, Trained, Finished, RunClosed)
_ROLES = {
    "mlflow.follow": "process for MLflow",
    "_forkserver": "fork server",
    "ray::RayTrainWorker": "rank",
    "ray::IDLE": "rank, not needed yet",
    "ray::": "Ray's agents",
    "gcs_server": "Ray's server",
    "raylet": "Ray's node",
    "-m pipeline": "driver",
}
"""Role of a process by a part of its command line; the first that is in it."""
_FIRST_S = 3.0
_SAMPLE_S = 0.5

Memory = dict[str, list[float]]
"""PSS and USS in MiB by role, summed over its processes, and the number of these."""


def main() -> None:
    """Run all in turn, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=[*TRAININGS])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    rows = [f"{name}, {launcher}" for name in arguments.trainings for launcher in arguments.launchers]
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    with TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):  # the first one creates the store and fills the file cache
            for row in rows:
                name, launcher = row.split(", ")
                taken = run(name, launcher, epochs=TRAININGS[name] if number else 1, folder=Path(folder))
                runs[row] += [taken] if number else []
    machine = detect()
    result = {"machine": f"{machine.processor}, {machine.summary}", "runs": runs}
    (arguments.out / "ends.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "ends.md").write_text(page(result))
    print(page(result))


def run(name: str, launcher: str, *, epochs: int, folder: Path) -> dict[str, Any]:
    """Run one training; return the seconds of its parts, its processor time, pace and memory."""
    workers = 1 if launcher == "inprocess" else 2
    asked = {"launcher": launcher, "workers": workers, "strategy": "ddp" if workers > 1 else "single"}
    keys = [f"parallel.{key}={value}" for key, value in asked.items()]
    file = HERE.parent / "experiments" / f"{name}.yaml"
    command = [sys.executable, "-m", "pipeline", "run", str(file), "--no-baseline", f"train.epochs={epochs}", *keys]
    before, known = resource.getrusage(resource.RUSAGE_CHILDREN), {*folder.glob("runs/*")}
    times = {"command": time.time()}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        memory = _watched(process)
    times["prompt"] = time.time()
    if process.returncode:
        raise SystemExit(f"{name}, {launcher}: {(folder / 'log.txt').read_text()[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (made,) = {*folder.glob("runs/*")} - known
    events = list(journal.read(made / journal.FILE_NAME))
    times |= {type(event).__name__: event.time for event in events if isinstance(event, _STAMPED)}
    *_, (_, times["last step"]) = _reports(events)
    return {
        "seconds": {part: times[end] - times[begin] for part, (begin, end) in PARTS.items()},
        "cpu": sum(after[:2]) - sum(before[:2]),
        "pace": pace(events),
        "memory": memory,
    }


def _watched(process: "subprocess.Popen[bytes]") -> Memory:
    """Wait for a command; return the memory of its processes at the moment at which they held most."""
    most: Memory = {}
    while process.poll() is None:
        time.sleep(_SAMPLE_S)
        held: Memory = {}
        try:
            root = psutil.Process(process.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            break
        for each in family:
            try:
                sizes, role = each.memory_full_info(), _role(each)
            except psutil.Error:  # it has just ended
                continue
            known = held.setdefault(role, [0.0, 0.0, 0])
            held[role] = [known[0] + sizes.pss / 2**20, known[1] + sizes.uss / 2**20, known[2] + 1]
        most = max(most, held, key=lambda memory: sum(pss for pss, *_ in memory.values()))
    process.wait()
    return most


def _role(process: psutil.Process) -> str:
    if process.name().startswith("rank"):  # the fork server's command line
        return "rank"
    line = " ".join(process.cmdline())
    return next((role for part, role in _ROLES.items() if part in line), process.name())


def _reports(events: Sequence[AnyEvent]) -> Iterator[tuple[int, float]]:
    """Yield step and time of each report of losses."""
    for event in events:
        if isinstance(event, Metrics) and any(point.name == "train/loss" for point in event.points):
            yield event.step, event.time


def pace(events: Sequence[AnyEvent]) -> list[float]:
    """Return ms of a step in the first seconds and later, evaluation and checkpoints included; empty if too short."""
    begin = next(event.time for event in events if isinstance(event, FirstStep))
    early = [(step, at) for step, at in _reports(events) if at - begin <= _FIRST_S]
    late = [(step, at) for step, at in _reports(events) if at - begin > _FIRST_S]
    if not early or not late:
        return []
    (step, at), (last, end) = early[-1], late[-1]
    return [1000 * (at - begin) / (step - 1), 1000 * (end - at) / (last - step)]


def page(result: dict[str, Any]) -> str:
    """Tables in Markdown: medians over the rounds."""
    runs: dict[str, list[dict[str, Any]]] = result["runs"]
    rounds = min(map(len, runs.values()))
    head = [f"| | {' | '.join(runs)} |", f"|---|{'--:|' * len(runs)}"]
    lines = ["# The ends of a run", "", f"{result['machine']}. Medians of {rounds} rounds, in ms.", "", *head]
    for part in PARTS:
        cells = (f"{1000 * median(one['seconds'][part] for one in of_row):,.0f}" for of_row in runs.values())
        lines.append(f"| {part} | {' | '.join(cells)} |")
    cells = (f"{1000 * median(one['cpu'] for one in of_row):,.0f}" for of_row in runs.values())
    lines.append(f"| processor time of the whole run | {' | '.join(cells)} |")
    lines += [
        "",
        f"## A step of the MLP in the first {_FIRST_S:g} s and later",
        "",
        "| | first, ms | later, ms | ratio |",
    ]
    lines.append("|---|--:|--:|--:|")
    for row, of_row in runs.items():
        if paces := [one["pace"] for one in of_row if one["pace"] and row.startswith("mlp")]:
            first, later = (median(values) for values in zip(*paces, strict=True))
            ratio = median(first / later for first, later in paces)
            lines.append(f"| {row} | {first:.2f} | {later:.2f} | {ratio:.2f} |")
    lines += ["", "## Who holds memory", "", "| | processes | PSS, MiB | USS, MiB |", "|---|--:|--:|--:|"]
    for row, of_row in runs.items():
        memory: Memory = sorted((one["memory"] for one in of_row), key=_sum)[len(of_row) // 2]
        lines.append(f"| **{row}** | | **{_sum(memory):,.0f}** | |")
        for role, (pss, uss, count) in sorted(memory.items(), key=lambda item: -item[1][0]):
            lines.append(f"| {role} | {count:.0f} | {pss:,.0f} | {uss:,.0f} |")
    return "\n".join(lines) + "\n"


def _sum(memory: Memory) -> float:
    return sum(pss for pss, *_ in memory.values())


if __name__ == "__main__":
    main()
