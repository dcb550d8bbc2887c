"""Sweeps that are interrupted and gone on with, under each launcher, and searched by Optuna."""

# promise: `sweep` under Ray Tune, stopped early, resumed

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from command import REPOSITORY
from leaks import BY_DESIGN, MARK
from swept import INPROCESS, Folder, section

from pipeline.protocol.events import Failed, Resumed, RunClosed, RunOpened, Started

pytestmark = [
    pytest.mark.timeout(900),
]

MLP = REPOSITORY / "experiments" / "mlp.yaml"
PATIENCE_S = 400.0
EPOCHS = 150
RATES = section(parameters={"optimizer.lr": {"grid": [0.1, 0.05, 0.02]}})
LONG = (*INPROCESS, f"train.epochs={EPOCHS}", "checkpoint.every_steps=5")

Start = Callable[..., "subprocess.Popen[str]"]


def until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ended(process: "subprocess.Popen[str]", code: int) -> str:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert "(raylet)" not in stdout
    return stdout + stderr


def descendants() -> list[psutil.Process]:
    """Processes of this test, orphans included."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == str(os.getpid()) and process.pid != os.getpid()
            is_ours = is_ours and not any(name in " ".join(process.cmdline()) for name in BY_DESIGN)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_ctrl_c_loses_nothing_and_resume_ends_what_is_left(start: Start, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    process = start("sweep", MLP, RATES, *LONG, cwd=tmp_path)
    until(lambda: (tmp_path / "runs").exists() and min(len(folder.epochs(n)) for n in (1, 2)) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = ended(process, 130)
    assert " --resume " in output
    psutil.wait_procs(descendants(), timeout=10)
    assert not [each for each in descendants() if "sweep_trial" in " ".join(each.cmdline())]
    assert [folder.of(n, RunClosed)[-1].status for n in (1, 2)] == ["KILLED", "KILLED"]
    assert folder.states == {1: "interrupted", 2: "interrupted", 3: "not started"}

    output = ended(start("sweep", MLP, RATES, *LONG, "--resume", cwd=tmp_path), 0)
    assert folder.states == dict.fromkeys((1, 2, 3), "completed"), output
    for n in (1, 2):
        assert [resumed.step > 0 for resumed in folder.of(n, Resumed)] == [True]
        assert folder.epochs(n) == list(range(1, EPOCHS + 1))  # each epoch once
    assert not folder.of(3, Resumed)
    runs = folder.children
    assert len(runs) == 4
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    more = start("sweep", MLP, RATES, *LONG, "--resume", cwd=tmp_path)
    assert "all 3 trials of" in ended(more, 2)


def test_a_trial_that_ray_loses_is_left_and_told(start: Start, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    sweep = ("sweep", MLP, RATES, *LONG, "sweep.concurrent=1")
    process = start(*sweep, cwd=tmp_path)
    until(lambda: (tmp_path / "runs").exists() and len(folder.epochs(1)) >= 1, process)

    def actors() -> list[psutil.Process]:  # Ray changes the title of a process with what it does
        children = psutil.Process(process.pid).children(recursive=True)
        return [one for one in children if "ray::ImplicitFunc" in " ".join(one.cmdline())]

    until(lambda: len(actors()) == 1, process)
    actors()[0].kill()
    output = ended(process, 1)
    assert "trial 1: interrupted: Ray lost the process that ran it" in output
    assert "trials that did not end: 1. To continue them, use --resume." in output
    assert folder.states == {1: "interrupted", 2: "completed", 3: "completed"}

    ended(start(*sweep, "--resume", cwd=tmp_path), 0)
    assert folder.states == dict.fromkeys((1, 2, 3), "completed")


def test_a_killed_sweep_goes_on_and_trains_no_trial_twice(start: Start, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    process = start("sweep", MLP, RATES, *LONG, cwd=tmp_path)
    until(
        lambda: (tmp_path / "runs").exists() and any(folder.of(n, RunClosed) for n in (1, 2) if folder.epochs(n)),
        process,
    )
    done = next(n for n in (1, 2) if folder.epochs(n) and folder.of(n, RunClosed))
    until(lambda: bool(folder.epochs(3)), process)
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs(descendants(), timeout=60)
    assert not left, [each.cmdline() for each in left]
    before = (folder.sweep / f"trial-{done:03}" / "events.jsonl").read_bytes()

    ended(start("sweep", MLP, RATES, *LONG, "--resume", cwd=tmp_path), 0)
    assert folder.states == dict.fromkeys((1, 2, 3), "completed")
    assert (folder.sweep / f"trial-{done:03}" / "events.jsonl").read_bytes() == before
    assert folder.epochs(3) == list(range(1, EPOCHS + 1))
    assert len(folder.of(3, RunOpened)) == 2


def test_more_trials_and_another_experiment(start: Start, tmp_path: Path) -> None:
    drawn = {"parameters": {"optimizer.lr": {"log_uniform": [0.01, 0.1]}}, "asha": True}
    short = (*INPROCESS, "train.epochs=2")
    ended(start("sweep", MLP, section(**drawn, trials=2), *short, cwd=tmp_path), 0)
    folder = Folder(tmp_path)
    before = {n: (folder.sweep / f"trial-{n:03}" / "events.jsonl").read_bytes() for n in (1, 2)}
    changed = start("sweep", MLP, section(**drawn, trials=3), *short, "model.hidden=[8]", "--resume", cwd=tmp_path)
    assert "model.hidden: is [8], but was [64, 64]" in ended(changed, 2)
    ended(start("sweep", MLP, section(**drawn, trials=3), *short, "--resume", cwd=tmp_path), 0)
    assert len(folder.states) == 3
    assert folder.of(3, Started)
    assert {n: (folder.sweep / f"trial-{n:03}" / "events.jsonl").read_bytes() for n in (1, 2)} == before


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_ddp_trials_take_turns_where_only_one_fits(launcher: str, start: Start, tmp_path: Path) -> None:
    workers = ("parallel.strategy=ddp", f"parallel.launcher={launcher}", "parallel.workers=2", "train.epochs=2")
    ended(start("sweep", MLP, section(parameters={"optimizer.lr": {"grid": [0.1, 0.05]}}), *workers, cwd=tmp_path), 0)
    folder = Folder(tmp_path)
    assert folder.states == {1: "completed", 2: "completed"}
    assert [len(folder.of(n, Started)[0].devices) for n in (1, 2)] == [2, 2]
    first, second = sorted((folder.events(n) for n in (1, 2)), key=lambda events: events[0].time)
    assert first[-1].time < second[0].time


def test_optuna_learns_is_repeatable_and_goes_on(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    parameters = {
        "optimizer.lr": {"log_uniform": [0.001, 1.0]},
        "model.hidden": {"choice": [[16], [32]]},
        "train.global_batch_size": {"int_log_uniform": [32, 128]},
    }
    parts = {"parameters": parameters, "search": "optuna", "concurrent": 1}
    short = (*INPROCESS, "train.epochs=1")
    results = []
    for name in "ab":
        (tmp_path / name).mkdir()
        ended(start("sweep", MLP, section(**parts, trials=2), *short, cwd=tmp_path / name), 0)
        results.append(Folder(tmp_path / name).values)
    assert results[0] == results[1]
    ended(start("sweep", MLP, section(**parts, trials=4), *short, "--resume", cwd=tmp_path / "a"), 0)
    values = Folder(tmp_path / "a").values
    assert values[:2] == results[0]
    assert len({json.dumps(each) for each in values}) == 4


def test_a_failed_trial_does_not_end_the_sweep(start: Start, project: Path, tmp_path: Path) -> None:
    there = (f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    faults = section(parameters={"model.fault": {"grid": ["raises", None]}})
    output = ended(start("sweep", "lab.yaml", faults, *there, cwd=project), 0)
    folder = Folder(tmp_path)
    assert folder.states == {1: "failed", 2: "completed"}
    assert folder.of(1, Failed)
    assert "trial 1 failed: " in output
    assert folder.children["trial-001"].info.status == "FAILED"


def test_all_trials_failed(start: Start, project: Path, tmp_path: Path) -> None:
    there = (f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    faults = section(parameters={"seed": {"grid": [1, 2]}})
    output = ended(start("sweep", "lab.yaml", faults, "model.fault=raises", *there, cwd=project), 1)
    assert "all 2 trials failed. The first error: " in output
