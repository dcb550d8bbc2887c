"""A local Ray that starts while the driver does something else, with fewer processes than by itself."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.errors import ResourceError
from pipeline.experiment.load import load
from pipeline.launch import ray as launcher
from pipeline.launch._ray import early

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
DDP = ("parallel.launcher=ray", "parallel.strategy=ddp", "parallel.workers=2")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def commands() -> str:
    """The command lines of the Ray processes that this one has started."""
    those = map(command, psutil.Process().children(recursive=True))
    return "\n".join(each for each in those if "/ray/core/" in each or each.startswith("ray::"))


def command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


def local_ray() -> early.LocalRay:
    return early.local_ray(load(MLP, DDP).experiment.parallel, verbose=False)


def test_what_was_begun_is_used_and_ended() -> None:
    with launcher.Launcher.preparing(load(MLP, DDP).experiment):
        (begun,) = early._begun
        with local_ray() as local:
            assert local is begun
            assert ray.cluster_resources()["CPU"] == 2 * (os.cpu_count() or 0)  # half of them for data functions
            there = commands()
        with local_ray() as another:
            assert another is not begun
    assert "raylet" in there
    assert not ray.is_initialized()
    assert not commands()


def test_nothing_is_started_that_nobody_asks() -> None:
    with local_ray():
        there = commands()
        assert "raylet" in there
        everything = "\n".join(map(command, psutil.Process().children(recursive=True)))
        assert not [name for name in ("dashboard.py", "monitor.py", "log_monitor.py") if name in everything]


def test_prepared_processes_become_workers() -> None:
    """Without that, workers would import torch after they have been placed."""

    class Worker:
        def is_prepared(self) -> tuple[int, bool]:
            return os.getpid(), "torch._dynamo" in sys.modules and "pipeline.worker" in sys.modules

    with local_ray():
        prepared = {
            each.pid for each in psutil.Process().children(recursive=True) if command(each).startswith("ray::IDLE")
        }
        group = placement_group([{"CPU": 1}] * 2)
        ray.get(group.ready())
        time.sleep(1.5)  # by itself Ray would end them: they are idle, and the cores are taken
        place = PlacementGroupSchedulingStrategy(placement_group=group)
        workers = [ray.remote(num_cpus=1, scheduling_strategy=place)(Worker).remote() for _ in range(2)]
        answers = dict(ray.get([worker.is_prepared.remote() for worker in workers]))
    assert answers == dict.fromkeys(prepared, True)
    assert len(prepared) == 2


def test_what_nobody_asked_for_is_ended() -> None:
    with launcher.Launcher.preparing(load(MLP, DDP).experiment):
        (begun,) = early._begun
    assert not early._begun
    assert not begun._thread.is_alive()
    assert not commands()


def test_ctrl_c_while_it_starts() -> None:
    begun = local_ray()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt), begun:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not begun._thread.is_alive()
    assert not commands()


def test_others_begin_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher.Launcher.preparing(load(MLP, [*DDP, "parallel.address=127.0.0.1:1"]).experiment):
        assert not early._begun
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with launcher.Launcher.preparing(load(MLP, DDP).experiment):
        assert not early._begun


def test_a_ray_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 30)))  # too long for a socket's path
    with pytest.raises(ResourceError, match=r"a local Ray could not be started: .* path length"), local_ray():
        pass
    assert not ray.is_initialized()
    assert not commands()


def test_a_wrong_component_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "run", str(MLP), *DDP, "model._target_=pipeline.models.MPL"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("pipeline.models has no MPL; did you mean MLP?") == 1
    assert "Traceback" not in done.stderr
