"""Record the runs of this folder anew: ``.venv/bin/python tests/journals/record.py [NAME]...``; all take ten minutes.

They are real runs, whose paths, host and user are replaced by those of nobody. After a change of the format a script
may rewrite what stands in git, as for those of 2026-11-23: their numbers are measured, later fields are filled in.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

import pipeline

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from stores import free_port  # noqa: E402 (of tests/support)

HOME, USER, NODE = "/home/user", "user", "node-1"
"""What stands in the recordings for this machine's; tests/system/replay puts its own folder in the place of `LAB`."""
LAB = f"{HOME}/lab"
PATIENCE_S = 400.0
INPROCESS = ["parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1"]
DDP = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2"]
PACED = ["model={_target_: lab.Sluggish, ms: 10}", "train.epochs=25", "train.log_every_steps=4",
         "train.evaluate_every_epochs=5", "train.precision=fp64", "optimizer.momentum=0.9",
         "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 20, gamma: 0.5}",
         "checkpoint.every_steps=10"]  # fmt: skip
"""Slow enough to be stopped in the middle: 100 steps of 10 ms."""


class Lab:
    """A user's folder, in which runs are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for source in (HERE / "tiny.yaml", *(HERE.parent / "project").glob("*.*")):
            shutil.copy(source, folder)
        git = ["git", "-c", "user.name=user", "-c", "user.email=user@localhost"]
        subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "start"], cwd=folder, check=True)

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        """``pipeline ARGUMENTS`` as a job of its own, which hears Ctrl-C."""
        sys.stderr.write(f"pipeline {' '.join(arguments)}\n")
        own = {**os.environ, "LOGNAME": USER, "USER": USER, "HOME": str(self.folder), **environment}
        own["PYTHONPATH"] = str(self.folder)
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *arguments], cwd=self.folder, env=own, process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> Path:
        """The folder of a run that has ended with an exit code."""
        process = self.start(*arguments)
        assert process.wait(PATIENCE_S) == code, process.returncode
        return self.newest

    @property
    def newest(self) -> Path:
        return max((self.folder / "runs").iterdir(), key=lambda path: path.stat().st_ctime)

    def wait(self, process: "subprocess.Popen[bytes]", known: set[Path], holds: Callable[[list[Any]], object]) -> None:
        """Wait until the journal of the run that has begun since says so."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, f"ended with {process.returncode}"
            assert time.monotonic() < deadline, "it takes too long"
            with suppress(OSError, ValueError):
                (folder,) = self.runs - known
                if holds([json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]):
                    return
            time.sleep(0.02)

    @property
    def runs(self) -> set[Path]:
        return set((self.folder / "runs").iterdir()) if (self.folder / "runs").exists() else set()


def finished(lab: Lab) -> Path:
    """Two workers under torchrun, a baseline and a reference before and after them."""
    return lab.run("run", "tiny.yaml")


def single(lab: Lab) -> Path:
    return lab.run("run", "tiny.yaml", *INPROCESS)


def failed(lab: Lab) -> Path:
    """The second of two ranks raises in its third step."""
    return lab.run("run", "lab.yaml", *DDP, "model={_target_: lab.Net, fault: raises, rank: 1}", code=1)


def nan(lab: Lab) -> Path:
    """Two steps are not finite and skipped: their losses are NaN in the journal."""
    return lab.run("run", "lab.yaml", *INPROCESS, "data={_target_: lab.holed, index: 7}", "train.on_nonfinite=skip")


def nan_stopped(lab: Lab) -> Path:
    return lab.run("run", "lab.yaml", "--no-baseline", *DDP, "data={_target_: lab.holed, index: 7}", code=1)


def interrupted(lab: Lab) -> Path:
    """By Ctrl-C, in the middle of training."""
    return _stopped(lab, signal.SIGINT, code=130)


def killed(lab: Lab) -> Path:
    """The driver by SIGKILL: nobody has closed the journal."""
    return _stopped(lab, signal.SIGKILL, code=-signal.SIGKILL)


def resumed(lab: Lab) -> Path:
    """What was killed, gone on with."""
    return lab.run("run", "lab.yaml", "--no-baseline", *DDP, *PACED, "--resume")


def elastic(lab: Lab) -> Path:
    """One Ray node of one core, joined by another in the middle, which is killed later."""
    more = ["train={epochs: 4, global_batch_size: 16, precision: fp64}", "data={_target_: lab.points, samples: 1200}"]
    more += [f"model={{_target_: lab.Paced, ms: 1000, release: {lab.folder}/release}}", "checkpoint.every_steps=10"]
    more += ["measure={warmup_steps: 1, steps: 2, windows: 2}", "parallel.workers=[1,2]"]
    with _ray_node(lab) as (address, _):
        known = lab.runs
        more += ["parallel.launcher=ray", "parallel.strategy=ddp", f"parallel.address={address}"]
        process = lab.start("run", "lab.yaml", "--no-baseline", *more, RAY_AUTH_MODE="disabled")
        lab.wait(process, known, lambda events: _workers(events) == [1])
        with _ray_node(lab, address) as (_, second):
            lab.wait(process, known, lambda events: _workers(events) == [1, 2])
            lab.wait(process, known, lambda events: _has_saved_since_resuming(events))
            _kill(second)
            lab.wait(process, known, lambda events: _workers(events) == [1, 2, 1])
        (lab.folder / "release").touch()
        assert process.wait(PATIENCE_S) == 0
    return lab.newest


def comparison(lab: Lab) -> Path:
    return lab.run("benchmark", "tiny.yaml", "--strategies", "single,ddp", "--workers", "1,2", "--repeats", "2")


def sweep(lab: Lab) -> Path:
    """Three trials, the last of which learns nothing and is stopped early."""
    what = {"parameters": {"optimizer.lr": {"grid": [0.1, 0.05, 1e-6]}}, "asha": {"reduction_factor": 2}}
    return lab.run("sweep", "tiny.yaml", *INPROCESS, "train.epochs=8", "metrics={}", f"sweep={json.dumps(what)}")


RECORDINGS: dict[str, Callable[[Lab], Path]] = {
    one.__name__.replace("_", "-"): one
    for one in (finished, single, failed, nan, nan_stopped, interrupted, killed, resumed, elastic, comparison, sweep)
}  # fmt: skip


def _stopped(lab: Lab, number: signal.Signals, *more: str, code: int) -> Path:
    known = lab.runs
    process = lab.start("run", "lab.yaml", "--no-baseline", *DDP, *PACED, *more)
    workers: list[psutil.Process] = []
    try:
        lab.wait(process, known, lambda events: _step(events) >= 45)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == code, process.returncode
    finally:
        psutil.wait_procs(workers, timeout=60)
    (folder,) = lab.runs - known
    return folder


def _step(events: list[Any]) -> int:
    return max((event["step"] for event in events if event["kind"] == "metrics"), default=0)


def _workers(events: list[Any]) -> list[int]:
    """Numbers of workers so far, each of which has come to new steps."""
    points = [point for event in events if event["kind"] == "metrics" for point in event["points"]]
    sizes = [int(value) for name, _, value in points if name == "throughput/workers"]
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] != size]


def _has_saved_since_resuming(events: list[Any]) -> bool:
    steps = {event["kind"]: event["step"] for event in events if event["kind"] in ("checkpoint_saved", "resumed")}
    return bool(steps.get("checkpoint_saved", 0) > steps.get("resumed", 0) > 0)


@contextmanager
def _ray_node(lab: Lab, address: str = "") -> Iterator[tuple[str, psutil.Process]]:
    """A node of one core: the head of a new cluster, or another one of that at ``address``."""
    temporary = Path(tempfile.mkdtemp(prefix="re", dir="/tmp"))  # a socket's path must be short
    role = [f"--address={address}"]
    if not address:
        address = f"127.0.0.1:{free_port()}"
        role = ["--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
        role += [f"--temp-dir={temporary}"]
    line = [Path(sys.executable).with_name("ray"), "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_NUM_REDIS_GET_RETRIES": "100", "PYTHONPATH": str(lab.folder)}
    with (temporary / "log.txt").open("w") as log:
        node = subprocess.Popen(
            [*line, *role, "--object-store-memory=100000000"], env=environment, stdout=log, stderr=log, cwd=temporary
        )
    try:
        while "Ray runtime started" not in (temporary / "log.txt").read_text():
            assert node.poll() is None, (temporary / "log.txt").read_text()
            time.sleep(0.1)
        yield address, psutil.Process(node.pid)
    finally:
        with suppress(psutil.NoSuchProcess):
            _kill(psutil.Process(node.pid))
        node.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def _kill(node: psutil.Process) -> None:
    everyone = [node, *node.children(recursive=True)]
    for process in everyone:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(everyone, timeout=10)


def keep(folder: Path, *, name: str, lab: Lab) -> None:
    """Copy a run into git: without what nobody reads, and with nothing of this machine."""
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(folder, HERE / name)
    for path in sorted((HERE / name).rglob("*"), reverse=True):
        if not path.is_file():
            with suppress(OSError):
                path.rmdir()  # an empty one
        elif path.suffix == ".channel" or ("logs" in path.parts and not path.stat().st_size):
            path.unlink()  # the way to a driver that is no more, or what no rank has said
        elif "checkpoints" in path.parts:
            path.unlink()
        elif path.suffix not in (".npy", ".pt"):
            path.write_text(_anonymous(path.read_text(), lab=lab))
    for folder in sorted((path for path in (HERE / name).rglob("*") if path.is_dir()), reverse=True):
        with suppress(OSError):
            folder.rmdir()
    _check(HERE / name, lab=lab)


def _replacements(lab: Lab) -> dict[str, str]:
    """What is this machine's, by what stands for it; the longest first."""
    packages = str(Path(torch.__file__).parents[1])
    code = str(Path(pipeline.__file__).parents[1])
    own = {str(lab.folder): LAB, packages: f"{HOME}/.venv/lib/python3/site-packages", code: f"{HOME}/pipeline"}
    own |= {sys.prefix: f"{HOME}/.venv", sys.base_prefix: "/usr"}
    return dict(sorted(own.items(), key=lambda pair: -len(pair[0])))


def _anonymous(text: str, *, lab: Lab) -> str:
    """Replace what is this machine's, and leave out pictures: in their letters any word may stand."""
    for ours, nobodys in _replacements(lab).items():
        text = text.replace(ours, nobodys)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", NODE, text)
    return re.sub(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+", "", text)


def _check(folder: Path, *, lab: Lab) -> None:
    """Nothing of this machine is left."""
    forbidden = [*_replacements(lab), str(Path.home()), tempfile.gettempdir() + "/", str(HERE.parents[1])]
    for path in (path for path in folder.rglob("*") if path.is_file()):
        found = [text for text in forbidden if text.encode() in path.read_bytes() and text != "/usr"]
        assert not found, f"{path} has {found}"


def main() -> None:
    names = sys.argv[1:] or list(RECORDINGS)
    if "resumed" in names and "killed" not in names:
        names = ["killed", *names]
    with tempfile.TemporaryDirectory() as temporary:
        lab = Lab(Path(temporary).resolve())
        for name in [name for name in RECORDINGS if name in names]:
            keep(RECORDINGS[name](lab), name=name, lab=lab)


if __name__ == "__main__":
    main()
