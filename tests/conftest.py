"""What all tests share: the leak police, a user's project, the command as users call it, and one session per launcher."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pipeline import cli, registry
from pipeline.config.load import load
from pipeline.contract import AnyEvent, Trial
from pipeline.launchers.base import Session, WorkersLost
from pipeline.plan import make_plan
from pipeline.recording import journal
from pipeline.recording.recorder import Recorder
from pipeline.recording.run import open_trial
from pipeline.resources import Resources

REPOSITORY = Path(__file__).parent.parent
MARK = "PIPELINE_TESTS"
"""In the environment of every process that descends from the tests, orphans included."""
PATIENCE_S = 10.0
"""How long what a test has started may take to go away."""
_BY_DESIGN = "multiprocessing.resource_tracker"  # Python keeps it until the interpreter ends
_SET_FOR_GOOD = (
    "PYTEST_",  # the running test
    "MLFLOW_",  # MLflow's patience, see pipeline.recording.delivery
    "KMP_",  # scikit-learn and torch, when they are imported
    "RAY_CLIENT_MODE",  # Ray, when it is imported
)


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())


class State(NamedTuple):
    """What a test must leave as it was."""

    processes: frozenset[int]
    environment: Mapping[str, str]
    threads: frozenset[threading.Thread]
    handlers: tuple[object, ...]

    @classmethod
    def now(cls) -> "State":
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_SET_FOR_GOOD)}
        threads = frozenset(thread for thread in threading.enumerate() if not thread.daemon)
        handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        return cls(frozenset(psutil.pids()), variables, threads, handlers)

    def leaks(self) -> list[str]:
        """What has changed since. Processes get some time to end, and are killed after that."""
        now = State.now()
        leaks = [f"process {_shown(process)}" for process in _still_there(now.processes - self.processes)]
        leaks += [
            f"environment variable {name}: {self.environment.get(name)!r} became {now.environment.get(name)!r}"
            for name in sorted(self.environment.keys() | now.environment.keys())
            if self.environment.get(name) != now.environment.get(name)
        ]
        leaks += [f"thread {thread.name}" for thread in now.threads - self.threads if thread.is_alive()]
        if now.handlers != self.handlers:
            leaks.append("a signal handler")
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            leaks.append("an initialized process group")
            distributed.destroy_process_group()
        return leaks


def _still_there(pids: frozenset[int]) -> list[psutil.Process]:
    ours = [process for pid in pids if (process := _ours(pid)) is not None]
    _, alive = psutil.wait_procs(ours, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    return alive


def _ours(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        marked = process.environ().get(MARK) == str(os.getpid())
        counts = marked and process.status() != psutil.STATUS_ZOMBIE and _BY_DESIGN not in " ".join(process.cmdline())
    except psutil.Error:
        return None
    return process if counts else None


def _shown(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    """No test may leave processes, environment variables, threads, signal handlers or a process group behind."""
    before = State.now()
    yield
    if leaks := before.leaks():
        pytest.fail("left behind: " + "; ".join(leaks))


@pytest.fixture(autouse=True, scope="module")
def leak_police_of_modules() -> Iterator[None]:
    """The same for fixtures that the tests of a module share."""
    before = State.now()
    yield
    if leaks := before.leaks():
        pytest.fail("left behind by a module: " + "; ".join(leaks))


LAB = Path(__file__).with_name("lab.py.txt")
