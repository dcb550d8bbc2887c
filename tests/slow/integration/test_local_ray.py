"""A local Ray that starts while the driver does something else."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from pipeline.errors import ResourceError
from pipeline.experiment.load import load
from pipeline.launch import ray as launcher
from pipeline.launch.cluster import LocalRay

MLP = Path(__file__).parents[3] / "experiments" / "mlp.yaml"
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


def test_what_was_begun_is_used_and_ended() -> None:
    with launcher.Launcher.preparing(load(MLP, DDP).experiment):
        assert LocalRay.begun is not None
        with LocalRay.begun:
            assert ray.cluster_resources()["CPU"] == os.cpu_count()
            there = commands()
        assert LocalRay.begun is None
    assert "raylet" in there
    assert not ray.is_initialized()
    assert not commands()


def test_ctrl_c_while_it_starts() -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    begun = LocalRay(verbose=False)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt), begun:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert LocalRay.begun is None
    assert not commands()


def test_others_begin_none() -> None:
    with launcher.Launcher.preparing(load(MLP, [*DDP, "parallel.address=127.0.0.1:1"]).experiment):
        assert LocalRay.begun is None


def test_a_ray_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 30)))  # too long for a socket's path
    begun = LocalRay(verbose=False)
    with (
        pytest.raises(ResourceError, match=r"a local Ray could not be started: .* path length.* Set TMPDIR"),
        begun,
    ):
        pass
    assert LocalRay.begun is None
    assert not ray.is_initialized()
    assert not commands()


def test_a_wrong_component_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "run", str(MLP), *DDP, "model._target_=pipeline.models.MPL"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("pipeline.models has no MPL; did you mean MLP?") == 1
    assert "Traceback" not in done.stderr
