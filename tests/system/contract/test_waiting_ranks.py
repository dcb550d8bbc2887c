"""Processes of ranks that start before there is a trial, and what becomes of them."""

# promise: ranks import torch while the experiment is checked; none is left that got no trial

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from outer import outer_torchrun
from waiting import eventually

from pipeline.experiment.load import load
from pipeline.experiment.targets import BUILT_IN
from pipeline.launch import torchrun
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.channel import Inbox
from pipeline.protocol.events import AnyEvent, Finished
from pipeline.protocol.trial import Job, Rank

MLP = Path(__file__).parents[3] / "experiments" / "mlp.yaml"
DDP = ("parallel.launcher=torchrun", "parallel.strategy=ddp", "parallel.workers=2")
LAB = """
import torch
from threadpoolctl import threadpool_info


class Counting(torch.nn.Linear):
    def forward(self, x):
        print("threads", torch.get_num_threads(), {pool["num_threads"] for pool in threadpool_info()})
        return super().forward(x.flatten(1))
"""


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a job."""
    process = torchrun._start(["no_such_library"], None, quiet=True)  # which is for the check to tell
    yield process
    torchrun._end([process], patience_s=0.0)


def test_ranks_start_before_there_is_a_trial_and_end_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchrun.Launcher.preparing(load(MLP, DDP).experiment):
        begun = list(torchrun._waiting)
        assert len(begun) == min(2, len(os.sched_getaffinity(0)))
        assert begun[0].args[-1] == "torchmetrics"  # type: ignore[index] # whose metric the experiment has
        assert os.environ["PYTHONHASHSEED"] == str(load(MLP).experiment.seed)
    assert not torchrun._waiting
    assert [process.poll() is not None for process in begun] == [True] * len(begun)
    for name, value in outer_torchrun(rank=1).items():
        monkeypatch.setenv(name, value)
    with torchrun.Launcher.preparing(load(MLP, DDP).experiment):
        assert not torchrun._waiting, "each process of torchrun is a rank itself"


def test_an_interrupt_while_they_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        if begun:
            raise KeyboardInterrupt
        begun.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        return begun[0]

    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(torchrun, "_start", start)
    monkeypatch.setattr(torchrun.resources, "usable_cores", lambda: [0, 1])
    with pytest.raises(KeyboardInterrupt), torchrun.Launcher.preparing(load(MLP, DDP).experiment):
        pass
    assert begun[0].poll() is not None


def test_one_that_waits_ends_with_its_driver(waiting: subprocess.Popen[bytes]) -> None:
    assert os.getsid(waiting.pid) == waiting.pid, "Ctrl-C is for the driver"
    assert waiting.stdin is not None
    waiting.stdin.close()  # as when the driver is killed
    assert waiting.wait(60) == 0


def test_a_signal_ends_one_that_waits(waiting: subprocess.Popen[bytes]) -> None:
    time.sleep(0.2)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(60) == -signal.SIGTERM


def test_it_has_the_name_the_output_and_the_threads_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited with one thread, and some libraries look only once."""
    (tmp_path / "lab.py").write_text(LAB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = "model={_target_: lab.Counting, in_features: 64, out_features: 10}"
    experiment = load(MLP, [model, "train.epochs=1", "metrics={}", "parallel.workers=1"]).experiment
    plan = make_plan(experiment, Resources(cpus=2, memory_mb=4096), allowed=("lab", *BUILT_IN), with_baseline=False)
    trial = plan.main.model_copy(update={"cpus_per_worker": 2, "folder": str(tmp_path)})
    (tmp_path / "trial.json").write_text(trial.model_dump_json())
    events: list[AnyEvent] = []
    with Inbox(host="127.0.0.1", receive=lambda event, _: events.append(event)) as inbox:
        job = Job(
            trial=str(tmp_path / "trial.json"),
            channel=str(inbox.address),
            store=str(tmp_path / "store"),
            rank=Rank(),
            output=str(tmp_path),
        )
        process = torchrun._start([], None, quiet=True)
        assert process.stdin is not None
        process.stdin.write(f"{job.model_dump_json()}\n".encode())
        process.stdin.close()
        eventually(lambda: process.poll() is not None or psutil.Process(process.pid).name() == "rank 0")
        assert process.wait(120) == 0, (tmp_path / "rank0-stderr.log").read_text()
    assert any(isinstance(event, Finished) for event in events)
    lines = (tmp_path / "rank0-stdout.log").read_text().splitlines()
    assert {line for line in lines if line.startswith("threads")} == {"threads 2 {2}"}
