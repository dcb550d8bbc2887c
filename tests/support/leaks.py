"""The leak police: no test may leave anything running or changed behind."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psutil
import pytest
from hypothesis import settings

MARK = "PIPELINE_TESTS"  # In the environment of every process that descends from the tests, orphans included
PATIENCE_S = 10.0  # How long what a test has started may take to go away
BY_DESIGN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python keeps them until the interpreter ends; the second one is that of ranks.py."""
_SET_FOR_GOOD = (
    "PYTEST_",  # the running test
    "MLFLOW_HTTP_",  # MLflow's patience and silence, see pipeline.tracking.follow
    "MLFLOW_SUPPRESS_",
    "MLFLOW_DISABLE_",
    "_MLFLOW_",  # MLflow, when it is imported
    "KMP_",  # scikit-learn and torch, when they are imported
    "PYTORCH_NVML_",  # Lightning, which MLflow imports where it is installed
    "TORCHINDUCTOR_",  # torch, when the inductor is imported
    "_TORCHINDUCTOR_",  # the inductor, when it compiles
    "RAY_CLIENT_MODE",  # Ray, when it is imported
)


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())  # of this process: with pytest-xdist each one looks after its own
    # The same examples in each run of the gate; HYPOTHESIS_PROFILE=default draws others.
    settings.register_profile("gate", derandomize=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
    # A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", r"ignore::Warning:ray\.")  # Ray's own, on its first import


class State(NamedTuple):
    """What a test must leave as it was."""

    processes: frozenset[int]
    environment: Mapping[str, str]
    threads: frozenset[threading.Thread]
    handlers: tuple[object, ...]

    @classmethod
    def now(cls) -> "State":
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_SET_FOR_GOOD)}
        # MLflow's artifact repositories keep their pool until they are collected.
        threads = frozenset(t for t in threading.enumerate() if not t.daemon and not t.name.startswith("Mlflow"))
        handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        return cls(frozenset(psutil.pids()), variables, threads, handlers)

    def leaks(self, *, with_processes: bool = True) -> list[str]:
        """What has changed since. Processes get some time to end, and are killed after that."""
        now = State.now()
        started = now.processes if with_processes else self.processes
        leaks = [f"process {process}" for process in _still_there(started, before=self.processes)]
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


def _still_there(pids: frozenset[int], *, before: frozenset[int]) -> list[str]:
    ours = [process for pid in pids - before if (process := _ours(pid)) is not None]
    # What a fixture of larger scope has started may start more: a cluster its workers.
    ours = [process for process in ours if not any(_ours(parent.pid) for parent in _parents(process, among=before))]
    _, alive = psutil.wait_procs(ours, timeout=PATIENCE_S)
    shown = [_shown(process) for process in alive]
    for process in alive:
        process.kill()
    return shown


def _parents(process: psutil.Process, *, among: frozenset[int]) -> list[psutil.Process]:
    try:
        return [parent for parent in process.parents() if parent.pid in among]
    except psutil.Error:
        return []


def _ours(pid: int) -> psutil.Process | None:
    """The process, if it descends from the tests, lives, and isn't there by design."""
    try:
        process = psutil.Process(pid)
        marked = process.environ().get(MARK) == str(os.getpid())
        line = " ".join(process.cmdline())
        counts = marked and process.status() != psutil.STATUS_ZOMBIE and not any(name in line for name in BY_DESIGN)
    except psutil.Error:
        return None
    return process if counts else None


def _shown(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave processes, environment variables, threads, signal handlers or a process group behind."""
    before = State.now()
    yield
    restarts = "server" in request.fixturenames  # the MLflow server of a whole module, which some tests kill and start
    if leaks := before.leaks(with_processes=not restarts):
        pytest.fail("left behind: " + "; ".join(leaks))


@pytest.fixture(autouse=True, scope="module")
def leak_police_of_modules() -> Iterator[None]:
    """The same for fixtures that the tests of a module share."""
    before = State.now()
    yield
    if leaks := before.leaks():
        pytest.fail("left behind by a module: " + "; ".join(leaks))
