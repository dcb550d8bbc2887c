"""The command as users call it, in this process or as one of its own, in a user's project."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline import cli

REPOSITORY = Path(__file__).parents[2]
EXPERIMENT = {
    "name": "from-a-dict",
    "model": {"_target_": "lab.Net"},
    "data": {"_target_": "lab.points"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "train": {"epochs": 2, "global_batch_size": 16},
    "tracking": {"log_model": False},
}
"""An experiment of the user's project, as a dict."""


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tests/project: a user's own package, and the experiment lab.yaml that uses it."""
    return Path(shutil.copytree(REPOSITORY / "tests" / "project", tmp_path_factory.mktemp("user") / "project"))


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's project as working directory; what a notebook has: nothing of it on the path."""
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The user's project as a git repository."""
    source, ignored = REPOSITORY / "tests" / "project", shutil.ignore_patterns("__pycache__")
    folder = Path(shutil.copytree(source, tmp_path / "project", ignore=ignored))
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Facts of the result that ``--json`` printed, by trial and key."""
        document, found = json.loads(self.stdout), dict[str, dict[str, Any]]()
        cells = [cell for table in document["tables"] for row in table["rows"] for cell in row if type(cell) is dict]
        for fact in (*cells, *document["facts"]):
            found.setdefault(fact["trial"], {})[fact["key"]] = fact
        return found

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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return Ended(int(exit_.value.code or 0), *capfd.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def line_of(*arguments: str | Path) -> list[str]:
    """The command line of ``pipeline ARGUMENTS``."""
    return [sys.executable, "-m", "pipeline", *map(str, arguments)]


def started(*arguments: str | Path, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    """``pipeline ARGUMENTS`` as a process, leader of its own process group like a shell's job."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line_of(*arguments), cwd=cwd, text=True, process_group=0, **pipes, **more)


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
    """A run of experiments/mlp.yaml in fp64 under Ray with everything, in a git repository with a change."""

    cwd: Path
    folder: Path
    ended: Ended


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    cwd = tmp_path_factory.mktemp("whole")
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run([*git, "init", "--quiet"], cwd=cwd, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "start"], cwd=cwd, check=True)
    short = ["parallel.launcher=ray", "train.precision=fp64", "benchmark.time_budget_s=5"]  # three pairs
    process = started("run", REPOSITORY / "experiments" / "mlp.yaml", *short, cwd=cwd)
    stdout, stderr = process.communicate(timeout=200)
    (folder,) = (cwd / "runs").iterdir()
    if "pipeline sync" in stdout:  # on a machine so busy that MLflow didn't have everything a minute after the end
        started("sync", folder, cwd=cwd).communicate(timeout=200)
    return WholeRun(cwd, folder, Ended(process.returncode, stdout, stderr))
