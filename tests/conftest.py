"""What all tests share: leak police, a user's project, the command as users call it, a session of each launcher."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import settings

from pipeline import cli, registry
from pipeline.config.load import load
from pipeline.config.project import allowed_packages
from pipeline.contract import Trial
from pipeline.events import AnyEvent
from pipeline.launchers import _head_start
from pipeline.launchers.base import Session, WorkersLost
from pipeline.plan import make_plan
from pipeline.recording import journal
from pipeline.recording.recorder import Recorder
from pipeline.recording.run import open_trial
from pipeline.resources import Resources

pytest_plugins = ["census", "attempts", "s3"]

REPOSITORY = Path(__file__).parent.parent
MARK = "PIPELINE_TESTS"
"""In the environment of every process that descends from the tests, orphans included."""
PATIENCE_S = 10.0
"""How long what a test has started may take to go away."""
_BY_DESIGN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python keeps them until the interpreter ends; the second one is that of tests/ranks.py."""
_SET_FOR_GOOD = (
    "PYTEST_",  # the running test
    "MLFLOW_HTTP_",  # MLflow's patience and silence, see pipeline.recording.delivery
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
    os.environ[MARK] = str(os.getpid())
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
        counts = marked and process.status() != psutil.STATUS_ZOMBIE and not any(name in line for name in _BY_DESIGN)
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


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tests/project: a user's own package, and the experiment lab.yaml that uses it."""
    return Path(shutil.copytree(REPOSITORY / "tests" / "project", tmp_path_factory.mktemp("user") / "project"))


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@pytest.fixture
def command(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """``pipeline ARGUMENTS`` in this process, which saves importing torch each time; it is in the user's project."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the working directory to both
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return Ended(int(exit_.value.code or 0), *capfd.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


def started(*arguments: str | Path, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    """``pipeline ARGUMENTS`` as a process, leader of its own process group like a shell's job."""
    line = [sys.executable, "-m", "pipeline", *map(str, arguments)]
    return subprocess.Popen(
        line, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, **more
    )


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``pipeline ARGUMENTS`` as a process that ends with the test."""
    with ExitStack() as stack:

        def run(*arguments: str | Path, cwd: Path, **more: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(started(*arguments, cwd=cwd, **more))
            stack.callback(process.kill)
            return process

        yield run


class WholeRun(NamedTuple):
    """A run of experiments/mlp.yaml with everything, in a git repository with a change."""

    cwd: Path
    folder: Path
    ended: Ended


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    cwd = tmp_path_factory.mktemp("whole")
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run([*git, "init", "--quiet"], cwd=cwd, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "start"], cwd=cwd, check=True)
    process = started("run", REPOSITORY / "experiments" / "mlp.yaml", cwd=cwd)
    stdout, stderr = process.communicate(timeout=200)
    (folder,) = (cwd / "runs").iterdir()
    return WholeRun(cwd, folder, Ended(process.returncode, stdout, stderr))


class Launched(NamedTuple):
    """What one session of a launcher left behind: the journal, and how its workers were lost, by trial."""

    folder: Path
    events: dict[str, list[AnyEvent]]
    losses: dict[str, dict[int, str]]
    leaks: list[str]


@pytest.fixture(scope="session")
def launched(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launched]:
    """One session for each launcher, whose trials many tests look at: starting workers takes most of the time."""

    @cache
    def run(name: str) -> Launched:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            patch.syspath_prepend(project)
            patch.delenv("RAY_ADDRESS", raising=False)
            return _launched(name, tmp_path_factory.mktemp(name))

    return run


def _launched(name: str, folder: Path) -> Launched:
    launcher = registry.load("launchers", name).Launcher
    trials = list(_trials(name, workers=2 if launcher.many_processes else 1))
    recorder = Recorder(folder, subscribers=[])
    session = Session(folder=folder, receive=recorder.receive, parallel=trials[0].experiment.parallel)
    losses: dict[str, dict[int, str]] = {}
    before = State.now()
    with closing(recorder), _head_start.given(trials[0].experiment), launcher(session) as ready:
        for trial in trials:
            open_trial(trial, recorder)
            try:
                ready.launch(trial)
            except WorkersLost as lost:
                losses[trial.name] = lost.losses
    leaks = before.leaks()
    events: dict[str, list[AnyEvent]] = {trial.name: [] for trial in trials}
    for event in journal.read(folder / journal.FILE_NAME):
        events.setdefault(event.trial, []).append(event)  # a node's load belongs to no trial
    return Launched(folder, events, losses, leaks)


def _trials(launcher: str, *, workers: int) -> Iterator[Trial]:
    """Trainings that must be equal, then those that must fail; the killed one last."""
    mlp, lab = REPOSITORY / "experiments" / "mlp.yaml", Path("lab.yaml")
    yield _trial(mlp, "fp64", launcher, workers=workers, more=["train.precision=fp64", "train.epochs=2"])
    yield _trial(mlp, "fp32", launcher, workers=workers, more=["train.epochs=1"])
    last = workers - 1
    yield _trial(lab, "raises", launcher, workers=workers, more=["model.fault=raises", f"model.rank={last}"])
    if workers > 1:
        yield _trial(lab, "killed", launcher, workers=workers, more=["model.fault=killed", f"model.rank={last}"])


def _trial(path: Path, name: str, launcher: str, *, workers: int, more: list[str]) -> Trial:
    overrides = ["parallel.strategy=ddp", f"parallel.launcher={launcher}", f"parallel.workers={workers}", *more]
    resources = Resources(cpus=2, memory_mb=4096)
    plan = make_plan(load(path, overrides).experiment, resources, allowed=allowed_packages(), with_baseline=False)
    return plan.main.model_copy(update={"name": name, "cpus_per_worker": 1})
