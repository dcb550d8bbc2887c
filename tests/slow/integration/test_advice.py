"""Advice from real measurements, each of a training made so that it is true, and of one made so that it isn't."""

# promise: advice on a run that needs it, measured

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import printed_rank
import pytest

from pipeline import registry
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.launch.base import Session
from pipeline.plan import resources
from pipeline.plan.plan import make_plan
from pipeline.protocol.events import AnyEvent, Failed, Finished, event_from_json
from pipeline.protocol.trial import Trial
from pipeline.results.advice import advise
from pipeline.results.record import Advice
from pipeline.results.speedup import find_main, measure_rows

DDP = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun", "parallel.cpus_per_worker=1"]
PORT = 29400
MBIT = 200


@pytest.fixture(autouse=True)
def at_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("PYTHONPATH", f"{project}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def advised(folder: Path, *overrides: str, with_baseline: bool = False) -> tuple[Advice, ...]:
    """What a run would advise."""
    experiment = load("lab.yaml", list(overrides)).experiment
    machine = resources.detect()
    plan = make_plan(experiment, machine, allowed=allowed_packages(), with_baseline=with_baseline)
    events: list[AnyEvent] = []
    session = Session(folder=folder, receive=lambda event, *_: events.append(event), parallel=experiment.parallel)
    for trial in plan.trials:
        kind = trial.launcher if trial.workers > 1 else "inprocess"  # it takes seconds to start a process
        with registry.load("launchers", kind).Launcher(session) as launcher:
            events += launcher.launch(trial).beside
    return from_events(plan.measured, events, cores=machine.cpus)


def from_events(trials: tuple[Trial, ...], events: list[AnyEvent], *, cores: int) -> tuple[Advice, ...]:
    assert [event.error for event in events if isinstance(event, Failed)] == []
    ends = [event for event in events if isinstance(event, Finished)]
    rows = measure_rows(trials, ends)
    return advise(rows, find_main(rows), experiment=trials[0].experiment, cores=cores)


def keys(advice: tuple[Advice, ...]) -> list[str]:
    return [word.partition("=")[0] for one in advice for word in one.overrides[:1]]


def test_a_slow_loader(tmp_path: Path) -> None:
    """Batches of 16 take 128 ms to read, much longer than another program on the machine would take a core."""
    advice = advised(tmp_path, "data={_target_: lab.slow_points, ms: 8.0}")

    assert keys(advice) == ["loader.num_workers"]


def test_a_loader_that_is_quick_compared_with_the_model(tmp_path: Path) -> None:
    assert advised(tmp_path, "model={_target_: lab.Sluggish, ms: 60.0}") == ()


def test_a_tiny_model(tmp_path: Path) -> None:
    """One process is faster than two that exchange gradients; neither straggles."""
    longer = ["data={_target_: lab.points, samples: 1600}", "train.epochs=3"]
    advice = advised(tmp_path, *DDP, *longer, "benchmark.time_budget_s=8", with_baseline=True)

    assert "parallel.strategy" in keys(advice)
    chosen = advice[keys(advice).index("parallel.strategy")]
    assert "parallel.strategy=single" in chosen.overrides
    assert "exposed communication" in chosen.reason or "unclear" in chosen.reason
    assert not any("rank" in one.reason for one in advice)


def test_a_straggling_rank(tmp_path: Path) -> None:
    advice = advised(tmp_path, *DDP, "model={_target_: lab.Sluggish, ms: 40.0, rank: 1}")

    assert "rank 1 on" in advice[0].change


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them: eth0 with addresses 10.78.0.1 and 10.78.0.2."""
    names = (f"pipeline-{os.getpid()}-1", f"pipeline-{os.getpid()}-2")
    try:
        made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no ip command")
    if made.returncode:
        pytest.skip(f"network namespaces need CAP_NET_ADMIN: {made.stderr.strip()}")
    try:
        _ip("netns", "add", names[1])
        _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            _ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def shape(nodes: tuple[str, str]) -> None:
    for name in nodes:
        limit = ["tbf", "rate", f"{MBIT}mbit", "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit], check=True)


def between(nodes: tuple[str, str], folder: Path) -> tuple[Advice, ...]:
    """Advice for ddp with a worker on each node: 4 MB of gradients, 60 ms of computing."""
    model = "model={_target_: lab.Sluggish, ms: 60.0, width: 1024}"
    experiment = load("lab.yaml", [*DDP, model, "train.epochs=1"]).experiment
    trial = make_plan(experiment, resources.detect(), allowed=allowed_packages(), with_baseline=False).main
    assignment = folder / "trial.json"
    assignment.write_text(trial.model_dump_json())
    processes = [_worker(node, assignment, rank=rank) for rank, node in enumerate(nodes)]
    output, errors = processes[0].communicate(timeout=120)
    assert (processes[0].returncode, processes[1].wait(20)) == (0, 0), errors
    return from_events((trial,), [event_from_json(line) for line in output.splitlines()], cores=1)


def _worker(node: str, assignment: Path, *, rank: int) -> subprocess.Popen[str]:
    """A rank in a namespace, whose own host name tells it from the other's node."""
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": PORT}
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1, "LOCAL_RANK": 0}
    named = f"hostname node-{rank + 1} && exec {sys.executable} {printed_rank.__file__} {assignment}"
    return subprocess.Popen(
        ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", named],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        text=True,
    )


def test_a_slow_link(nodes: tuple[str, str], tmp_path: Path) -> None:
    shape(nodes)
    advice = between(nodes, tmp_path)

    assert ("parallel.options.communication_hook=fp16",) in [one.overrides for one in advice]


def test_a_link_that_is_not_slow(nodes: tuple[str, str], tmp_path: Path) -> None:
    assert "parallel.options.communication_hook" not in keys(between(nodes, tmp_path))
