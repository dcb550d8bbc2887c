"""What the driver does with the events of a thousand ranks: memory over time, and nothing dropped.

    python benchmarks/driver_scale.py                                      # 10 million points, the journal alone
    python benchmarks/driver_scale.py --tracked                            # the same into SQLite's MLflow store
    python benchmarks/driver_scale.py --points 200000 --tracked --out /tmp # quick

Simulated ranks, some hundred in each of a few processes, send metrics and a heartbeat each second through the real
channel; what a launcher and `pipeline run` put behind it is real, too: Inbox, Vigil, Recorder with its journal,
consoles, the process that writes to MLflow. In a training only rank 0 sends metrics; here all of them do, as fast as
the driver takes them. With --tracked, the run's end waits for MLflow as long as it takes. Resident memory is read once
a second; every point is counted in the journal and in the store. Writes results/driver_scale.json or
driver_scale_tracked.json, and a .md with the table.
"""

import argparse
import io
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import rich.console
from pydantic import BaseModel
from simulated_ranks import POINTS_PER_EVENT

from pipeline.config.load import load
from pipeline.launchers._hang_detector import HangDetector
from pipeline.planning.plan import make_plan
from pipeline.planning.resources import detect
from pipeline.protocol.channel.inbox import Inbox
from pipeline.protocol.events import Metrics
from pipeline.protocol.trial import Trial
from pipeline.recording.journal import journal
from pipeline.recording.journal.recorder import Recorder
from pipeline.recording.mlflow import mlflow_subscriber
from pipeline.recording.recorded_run import open_trial, recorded
from pipeline.recording.terminal.terminal import Terminal

HERE = Path(__file__).parent
_SENDERS = 4
_ROWS = 12
"""Of the table; all samples are in the JSON."""


class Sample(BaseModel):
    """The driver at one moment."""

    seconds: float
    """Since the first rank was started."""
    rss_mb: float
    """Resident memory of the driver."""
    tracker_mb: float
    """Resident memory of the process that writes to MLflow; 0 without."""
    points: int
    """Points that the recorder has taken."""


class Result(BaseModel):
    """What came out."""

    machine: str
    ranks: int
    points: int
    """Sent by all ranks together."""
    in_journal: int
    in_store: int | None
    """None if it was not tracked."""
    journal_mb: float
    connect_s: float
    """From the start of the ranks to the first point of the last one that connected."""
    receive_s: float
    """Until the journal had everything."""
    store_s: float | None
    """Until the store had everything, both from the start."""
    samples: list[Sample]

    @property
    def growth_mb_per_million(self) -> float:
        """Of the driver, from the first fifth of all points on, when everyone is connected, to the last sample."""
        first = next(sample for sample in self.samples if sample.points >= self.points / 5)
        last = self.samples[-1]
        highest = max(sample.rss_mb for sample in self.samples if sample.seconds >= first.seconds)
        return (highest - first.rss_mb) / max(1e-6, (last.points - first.points) / 1e6)


class Counter:
    """A subscriber that counts points and who sent them."""

    def __init__(self) -> None:
        self.points = 0
        self.heard: dict[str, float] = {}

    def receive(self, event: object) -> None:
        """Count."""
        if isinstance(event, Metrics):
            self.points += len(event.points)
            self.heard.setdefault(event.points[0].name, time.monotonic())


def main() -> int:
    """Simulate, count, write; 1 if anything was dropped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--points", type=int, default=10_000_000, help="of all ranks; rounded to whole events")
    parser.add_argument("--tracked", action="store_true", help="into MLflow, too")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    events = max(1, round(arguments.points / arguments.ranks / POINTS_PER_EVENT))
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(Path(folder), ranks=arguments.ranks, events=events, tracked=arguments.tracked)
    name = "driver_scale_tracked" if arguments.tracked else "driver_scale"
    (arguments.out / f"{name}.json").write_text(result.model_dump_json(indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text(page(result))
    print(page(result))
    return int({result.in_journal, result.points if result.in_store is None else result.in_store} != {result.points})


def simulate(folder: Path, *, ranks: int, events: int, tracked: bool) -> Result:
    """Run the driver with its ranks; ``events`` of each."""
    overrides = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}/runs"]
    plan = make_plan(
        load(HERE.parent / "experiments" / "mlp.yaml", overrides).experiment, detect(), with_baseline=False
    )
    terminal = Terminal.on(rich.console.Console(file=io.StringIO()))
    mlflow_subscriber._DRAIN_SECONDS = 24 * 3600.0  # a run gives MLflow a minute and leaves the rest to `pipeline sync`
    counter, samples, done = Counter(), list[Sample](), threading.Event()
    start = time.monotonic()
    watcher = threading.Thread(target=_sample, args=(samples, counter, start, done))
    with recorded(plan, terminal=terminal, tracked=tracked) as recorder:
        recorder.subscribe(counter)
        open_trial(plan.main, recorder)
        watcher.start()
        _receive(plan.main, recorder, ranks=ranks, events=events)
        received = time.monotonic() - start
    stored = time.monotonic() - start
    done.set()
    watcher.join()
    path = recorder.folder / journal.FILE_NAME
    return Result(
        machine=f"{detect().processor}, {detect().summary}",
        ranks=ranks,
        points=ranks * events * POINTS_PER_EVENT,
        in_journal=sum(len(event.points) for event in journal.read(path) if isinstance(event, Metrics)),
        in_store=_in_store(folder / "mlflow.db") if tracked else None,
        journal_mb=path.stat().st_size / 2**20,
        connect_s=max(counter.heard.values()) - start,
        receive_s=received,
        store_s=stored if tracked else None,
        samples=samples,
    )


def _receive(trial: Trial, recorder: Recorder, *, ranks: int, events: int) -> None:
    """As a launcher does: until all ranks have hung up."""
    detector = HangDetector(trial, receive=recorder.receive)
    inbox = Inbox(host="127.0.0.1", receive=detector.receive, folder=recorder.folder)
    address = recorder.folder / "channel.json"
    with detector.watching(), inbox:
        address.write_text(inbox.address.model_dump_json())
        command = [sys.executable, str(HERE / "simulated_ranks.py"), str(address), str(ranks), str(events)]
        senders = [subprocess.Popen([*command, str(first), str(_SENDERS)]) for first in range(_SENDERS)]
        codes = [sender.wait() for sender in senders]
    if any(codes):
        raise RuntimeError(f"the simulated ranks ended with {codes}")


def _sample(samples: list[Sample], counter: Counter, start: float, done: threading.Event) -> None:
    process = psutil.Process()
    trackers = [each for each in process.children() if "mlflow.follow" in " ".join(each.cmdline())]
    while not done.wait(1.0):
        rss, tracker = (sum(each.memory_info().rss for each in those) / 2**20 for those in ([process], trackers))
        now = time.monotonic() - start
        samples.append(Sample(seconds=now, rss_mb=rss, tracker_mb=tracker, points=counter.points))


def _in_store(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (count,) = database.execute("SELECT count(*) FROM metrics WHERE key LIKE 'rank_%'").fetchone()
    return int(count)


def page(result: Result) -> str:
    """The result as Markdown."""
    store = "not tracked" if result.in_store is None else f"{result.in_store:,} in MLflow's SQLite store"
    lines = [
        f"# The driver with {result.ranks:,} ranks",
        "",
        f"{result.machine}. {result.points:,} points sent, {result.in_journal:,} in the journal",
        f"({result.journal_mb:,.0f} MB), {store}. The last rank was heard after {result.connect_s:.1f} s,",
        f"the journal had everything after {result.receive_s:.0f} s ({result.points / result.receive_s:,.0f} points/s)"
        + (f", the store after {result.store_s:.0f} s." if result.store_s else "."),
        f"The driver's memory grew by {result.growth_mb_per_million:.1f} MB for each million points after the first",
        f"fifth; the one that writes to MLflow had {max(one.tracker_mb for one in result.samples):,.0f} MB at most.",
        "",
        "| seconds | points taken | driver, MB | writer to MLflow, MB |",
        "|--:|--:|--:|--:|",
    ]
    step = max(1, len(result.samples) // _ROWS)
    shown = [*result.samples[:-1:step], result.samples[-1]]
    lines += [
        f"| {sample.seconds:.0f} | {sample.points:,} | {sample.rss_mb:,.0f} | {sample.tracker_mb:,.0f} |"
        for sample in shown
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
