"""A user's project on nodes, and its runs."""

import shutil
import subprocess
from pathlib import Path

from command import Ended, line_of
from job import PATIENCE_S, Recording
from nodes import Nodes

LAB = Path(__file__).parents[1] / "project"


class Ran(Recording):
    """A command that has ended, and its run, if there was one."""

    def __init__(self, ended: Ended, folder: Path | None) -> None:
        super().__init__(folder or Path("there-is-none"))
        self.code, self.stdout, self.stderr = ended
        self.output = ended.output


def project(folder: Path, *, tracked: bool) -> Path:
    """A user's project; what git tracks is sent to the nodes."""
    shutil.copytree(LAB, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if tracked:
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        subprocess.run(["git", "add", "."], cwd=folder, check=True)
    return folder


def line(nodes: Nodes, cwd: Path, *arguments: str, node: int = 0) -> list[str]:
    """The command line of ``pipeline run lab.yaml`` on a node."""
    command = line_of("run", "lab.yaml", "--no-baseline", "--address", nodes.address)
    # The folder may have another path there.
    return nodes.inside(node, ["env", f"--chdir={nodes.path(node, cwd)}", *command, *arguments])


def run(nodes: Nodes, cwd: Path, *arguments: str, node: int = 0, runs: Path | None = None) -> Ran:
    """``pipeline run lab.yaml`` on a node, with the folder of its runs."""
    where = [] if runs is None else [f"tracking.directory={runs}"]
    runs = runs or cwd / "runs"
    before = set(runs.glob("*"))
    done = subprocess.run(
        line(nodes, cwd, *arguments, *where, node=node),
        env=nodes.environment,
        cwd=nodes.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    new = set(runs.glob("*")) - before
    return Ran(Ended(done.returncode, done.stdout, done.stderr), new.pop() if new else None)
