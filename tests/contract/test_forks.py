"""Worker processes that are forked from one that is ready, or started afresh where that can't be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import psutil
import pytest
import toys
from outer import outer_torchrun

from pipeline.experiment.load import load
from pipeline.experiment.schema import Parallel
from pipeline.experiment.targets import BUILT_IN
from pipeline.launch import _head_start, torchrun
from pipeline.launch._forks import Forks, Process
from pipeline.launch.base import Session
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Warned

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"


LAB = """
import torch
from threadpoolctl import threadpool_info


class Counting(torch.nn.Linear):
    def forward(self, x):
        print("threads", torch.get_num_threads(), {pool["num_threads"] for pool in threadpool_info()})
        return super().forward(x.flatten(1))
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A server that finds a user's package, lab."""
    package = tmp_path_factory.mktemp("package")
    (package / "lab.py").write_text(LAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package))
        with Forks(["no_such_library"]) as ready:  # which is for the check to tell
            yield ready


@pytest.fixture
def endless(tmp_path: Path) -> list[str]:
    """Arguments of a worker that waits for its trial for ever."""
    os.mkfifo(tmp_path / "trial.json")
    return [str(tmp_path / "trial.json")]


def environment(rank: int = 0) -> dict[str, str]:
    return os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}


def ended(process: Process, *, within_s: float = 60) -> int:
    deadline = time.monotonic() + within_s
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)
    return code


def test_what_it_prints_and_its_exit_codes(forks: Forks, tmp_path: Path) -> None:
    out, err = tmp_path / "out.log", tmp_path / "err.log"
    good = forks.start(["--help"], environment=environment(), logs=(out, err))
    bad = forks.start(["missing.json"], environment=environment(), logs=(tmp_path / "other.log", err))

    assert not isinstance(good, subprocess.Popen)
    assert (ended(good), ended(bad)) == (0, 1)
    assert "JSON of the trial" in out.read_text()
    assert "FileNotFoundError" in err.read_text()


def test_a_process_of_its_own(forks: Forks, endless: list[str], tmp_path: Path) -> None:
    """With a name to be found by, in its own session, and signals that end it."""
    rank = forks.start(endless, environment=environment(3), logs=(tmp_path / "out", tmp_path / "err"))
    process = psutil.Process(rank.pid)
    while process.name() != "rank 3":
        time.sleep(0.02)

    assert rank.poll() is None
    assert os.getsid(rank.pid) == rank.pid
    assert process.num_threads() == 1
    os.kill(rank.pid, signal.SIGTERM)
    assert ended(rank) == -signal.SIGTERM


def test_ctrl_c_ends_it(forks: Forks, endless: list[str], tmp_path: Path) -> None:
    rank = forks.start(endless, environment=environment(), logs=(tmp_path / "out", tmp_path / "err"))
    while psutil.Process(rank.pid).name() != "rank 0":
        time.sleep(0.02)

    os.kill(rank.pid, signal.SIGINT)

    assert ended(rank) == -signal.SIGINT
    assert "KeyboardInterrupt" in (tmp_path / "err").read_text()


def test_a_job_s_signals_leave_it_ready(forks: Forks, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        forks._server.send_signal(number)

    rank = forks.start(["--help"], environment=environment(), logs=(tmp_path / "out", tmp_path / "err"))

    assert ended(rank) == 0


def test_a_library_that_starts_threads_cannot_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each worker is started afresh, and one warning says so."""
    restless = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "restless.py").write_text(restless)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with Forks(["restless"]) as forks:
        rank = forks.start(["--help"], environment=environment(), logs=(tmp_path / "out", tmp_path / "err"))

        assert isinstance(rank, subprocess.Popen)
        assert ended(rank) == 0
    forks.start = lambda *_, **__: SimpleNamespace(poll=lambda: 0)  # type: ignore[method-assign]
    events: list[AnyEvent] = []
    launcher = torchrun.Launcher(Session(folder=tmp_path, receive=events.append, parallel=Parallel()))
    for _ in range(2):
        launcher._run(toys.trial(), [], forks)
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "Workers can't be forked: importing restless starts threads or opens a GPU. "
        "Workers now start as new processes, which takes longer. Results are not affected."
    ]


def test_a_gpu_in_use_cannot_be_forked(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    code = f"""
        from pipeline.system import process
        before = process.can_fork()
        process._GPUS = ({str(tmp_path)!r},)
        with open({str(device)!r}):
            print(before, process.can_fork())
        print(process.can_fork())
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "False", "True"]


class TestHeadStart:
    DDP = ("parallel.launcher=torchrun", "parallel.strategy=ddp", "parallel.workers=2")

    def test_what_was_begun_is_used(self) -> None:
        with _head_start.given(load(MLP, self.DDP).experiment):
            (begun,) = _head_start._begun
            with _head_start.forks() as used:
                assert used is begun
                assert not _head_start._begun
                assert used._server.args[-1] == "torchmetrics"  # whose metric the experiment has
                environment = Path(f"/proc/{used._server.pid}/environ")
                while not environment.read_text():
                    time.sleep(0.01)  # the kernel has not set it up
                assert f"PYTHONHASHSEED={load(MLP).experiment.seed}" in environment.read_text().split("\0")

    def test_what_nobody_asked_for_is_ended(self) -> None:
        with _head_start.given(load(MLP, self.DDP).experiment):
            (begun,) = _head_start._begun

        assert not _head_start._begun
        assert begun._server.poll() is not None

    def test_other_launchers_need_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with _head_start.given(load(MLP, ["parallel.launcher=inprocess"]).experiment):
            assert not _head_start._begun
            assert "PYTHONHASHSEED" not in os.environ  # too late for this interpreter
        for name, value in outer_torchrun(rank=1).items():
            monkeypatch.setenv(name, value)
        with _head_start.given(load(MLP, self.DDP).experiment):
            assert not _head_start._begun
            assert os.environ["OMP_NUM_THREADS"] == "1", "this process itself will be forked"


def test_threads_are_those_of_the_trial(forks: Forks, tmp_path: Path) -> None:
    """The server has had one, and some libraries look only once."""
    model = "model={_target_: lab.Counting, in_features: 64, out_features: 10}"
    experiment = load(MLP, [model, "train.epochs=1", "metrics={}", "parallel.workers=1"]).experiment
    resources = Resources(cpus=2, memory_mb=4096)
    plan = make_plan(experiment, resources, allowed=("lab", *BUILT_IN), with_baseline=False)
    trial = tmp_path / "trial.json"
    trial.write_text(plan.main.model_copy(update={"cpus_per_worker": 2}).model_dump_json())
    logs = (tmp_path / "out", tmp_path / "err")

    more = {"RANK": "0", "OMP_NUM_THREADS": "2"}
    rank = forks.start([str(trial)], environment=os.environ | more, logs=logs)
    assert ended(rank) == 0, logs[1].read_text()

    assert not isinstance(rank, subprocess.Popen)
    lines = [line for line in logs[0].read_text().splitlines() if line.startswith("threads")]
    assert set(lines) == {"threads 2 {2}"}


def test_without_its_server_a_worker_counts_as_lost_and_others_start_afresh(
    forks: Forks, endless: list[str], tmp_path: Path
) -> None:
    """The last test, which kills the server of those above."""
    logs = (tmp_path / "out", tmp_path / "err")
    rank = forks.start(endless, environment=environment(), logs=logs)
    assert not isinstance(rank, subprocess.Popen)
    forks._server.kill()

    assert ended(rank) == -signal.SIGKILL
    os.kill(rank.pid, signal.SIGKILL)
    fresh = forks.start(["--help"], environment=environment(), logs=logs)
    assert isinstance(fresh, subprocess.Popen)
    assert ended(fresh) == 0
