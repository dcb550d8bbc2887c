"""A link between two nodes that is slowed in the middle of a training: the spike is told, with its steps and a rank."""

# promise: how long gradients are exchanged while training runs, and its spikes; on a link that is slowed in the middle

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import Nodes

from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.plan import resources
from pipeline.plan.plan import make_plan
from pipeline.protocol.events import Finished, Metrics, Warned, event_from_json

pytestmark = pytest.mark.timeout(600)

PORT = 29400
CALM_REPORTS = 5
SLOW_MBIT = 1
OVERRIDES = [
    "parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun", "parallel.cpus_per_worker=1",
    "model={_target_: lab.Sluggish, ms: 20.0, width: 256}", "data={_target_: lab.points, samples: 800}",
    "train.epochs=3", "checkpoint.keep=0",
]  # fmt: skip
"""A quarter of a megabyte of gradients in 150 steps of 20 ms; at 1 Mbit/s it takes two seconds to exchange them."""


def worker(nodes: Nodes, assignment: Path, *, rank: int) -> subprocess.Popen[str]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": nodes.host(0),
        "MASTER_PORT": PORT,
    }
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        nodes.inside(rank, [sys.executable, "-m", "pipeline.worker", assignment]),
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_a_link_that_is_slowed_in_the_middle_shows_as_a_spike(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("PYTHONPATH", str(project))
    experiment = load("lab.yaml", OVERRIDES).experiment
    trial = make_plan(experiment, resources.detect(), allowed=allowed_packages(), with_baseline=False).main
    assignment = tmp_path / "trial.json"
    assignment.write_text(trial.model_copy(update={"train_only": True}).model_dump_json())

    with Nodes(2, started=False) as nodes:
        ranks = [worker(nodes, assignment, rank=rank) for rank in range(2)]
        assert ranks[0].stdout is not None
        reports, slowed_at, events = 0, 0, []
        for line in iter(ranks[0].stdout.readline, ""):
            events.append(event := event_from_json(line))
            if isinstance(event, Metrics) and any(p.name == "time/window_communication_ms" for p in event.points):
                reports += 1
                if reports == CALM_REPORTS:
                    nodes.shape(1, SLOW_MBIT)
                    slowed_at = event.step
                elif reports == CALM_REPORTS + 2:
                    nodes.shape(1, None)
        ranks[0].stdout.close()
        assert [rank.wait(60) for rank in ranks] == [0, 0]

    told = [
        event.message for event in events if isinstance(event, Warned) and "gradient synchronization" in event.message
    ]
    (end,) = [event for event in events if isinstance(event, Finished)]
    found = end.result.communication
    assert found is not None
    assert found.worst is not None
    assert found.worst.first_step > slowed_at - 10
    assert not found.worst.is_late
    assert any("on all ranks, longest on rank" in message for message in told)
    assert f"on {Nodes.name(found.worst.rank)}" in found.worst.sentence
