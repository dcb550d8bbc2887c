"""``torchrun --nnodes 2`` and ``srun`` over two nodes: the run of one process, stopped, killed, cut off and resumed.

For srun, a process on each node gets the variables that Slurm sets.
"""

# promise: an outer launcher on two nodes: losses to 1e-12, SIGTERM, kill, cut link, resume on another number of nodes
# promise: how long gradients are exchanged while training runs, and its spikes; on a link that is slowed in the middle

import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import blocks
from job import PATIENCE_S, Job, Recording
from nodes import Nodes
from outer import run_line, srun
from projects import project

from pipeline.protocol.events import CheckpointSaved, Finished, Resumed, RunClosed, Started, SystemMetrics, Warned
from pipeline.record import loss_file

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
EXACT = 1e-12
ROUNDED = 1e-5  # What docs/tutorial.md says of fp32
TRAINING = ["train.precision=fp64", "model={_target_: lab.Sluggish, ms: 20, width: 8}", "train.epochs=25"]
OFTEN = ["--no-baseline", "checkpoint.every_steps=10"]
DDP = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.cpus_per_worker=1"]
STEPS = 100
PORT = 29511
CALM_REPORTS = 5


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes that know each other by name; the name of each leads to loopback on the node itself."""
    with Nodes(2, started=False) as nodes:
        for node in range(2):
            lines = (
                "127.0.0.1 localhost",
                f"127.0.1.1 {nodes.name(node)}",
                f"{nodes.host(1 - node)} {nodes.name(1 - node)}",
            )
            (nodes.storage(node) / "hosts").write_text("\n".join((*lines, "")))
        yield nodes


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nobody disturbs."""
    cwd = project(tmp_path_factory.mktemp("alone") / "project", tracked=False)
    subprocess.run(run_line(*TRAINING, *OFTEN, "model.ms=0"), cwd=cwd, check=True, capture_output=True, timeout=200)
    (folder,) = (cwd / "runs").iterdir()
    return dict(Recording(folder).losses)


@pytest.fixture
def cwd(nodes: Nodes, request: pytest.FixtureRequest) -> Path:
    """A project on storage that both nodes share."""
    return project(nodes.folder / request.node.name.replace("[", "-").strip("]"), tracked=False)


def torchrun(nodes: Nodes, cwd: Path, *arguments: str, each: int = 1) -> Job:
    """``torchrun --nnodes 2`` with ``each`` workers on each node."""
    lines = []
    for node in range(2):
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={each}"]
        line += [f"--node-rank={node}", f"--master-addr={nodes.host(0)}", f"--master-port={PORT}", "-m"]
        lines.append(nodes.inside(node, [*line, *run_line(f"parallel.workers={2 * each}", *arguments)[2:]]))
    return Job(cwd).start(*lines, environments=[nodes.environment] * 2)


def tasks(nodes: Nodes, cwd: Path, *arguments: str) -> Job:
    """Start the tasks of ``srun --ntasks-per-node=1`` on two nodes."""
    variables = [srun(node, 2, host="node0", per_node="1(x2)", node=node, local_rank=0) for node in range(2)]
    lines = [nodes.inside(node, run_line(*TRAINING, *OFTEN, *DDP, "parallel.workers=2", *arguments)) for node in (0, 1)]
    return Job(cwd).start(*lines, environments=[{**nodes.environment, **each} for each in variables])


def test_torchrun_on_two_nodes_trains_what_one_process_does(nodes: Nodes, cwd: Path, alone: dict[int, float]) -> None:
    with torchrun(nodes, cwd, *TRAINING, *OFTEN, *DDP) as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert len(alone) == STEPS
    assert dict(ranks.losses) == pytest.approx(alone, rel=0, abs=EXACT)
    (started,) = ranks.all_of(Started)
    assert [device.split()[0] for device in started.devices] == ["node0", "node1"]
    assert first.stderr.count("starting 2 workers") == 1
    assert second.stdout == ""
    assert {event.node for event in ranks.all_of(SystemMetrics)} == {"node0", "node1"}


def test_the_commands_of_the_tutorial_train_on_two_nodes_what_one_process_does(nodes: Nodes, tmp_path: Path) -> None:
    tutorial = ROOT / "examples" / "tutorial"
    cwd, alone = (shutil.copytree(tutorial, folder / "tutorial") for folder in (nodes.folder, tmp_path))
    typed = [line for block in blocks(ROOT / "docs" / "tutorial.md", root=ROOT) for line in block.lines]
    told = [shlex.split(line)[1:] for line in typed if line.startswith("torchrun ")]
    shortened = ["--train-only", "train.epochs=1"]
    started = [[sys.executable, "-m", "torch.distributed.run", *words, *shortened] for words in told]
    lines = [nodes.inside(node, line) for node, line in enumerate(started)]
    with Job(cwd).start(*lines, environments=[nodes.environment] * 2) as ranks:
        first, second = ranks.ended()
    assert (first.code, second.code, second.stdout) == (0, 0, ""), first.output + second.output
    one = ["parallel.workers=1", "parallel.strategy=single", "parallel.launcher=inprocess"]
    line = [sys.executable, "-m", "pipeline", "run", "digits.yaml", *shortened, *one]
    subprocess.run(line, cwd=alone, check=True, capture_output=True, timeout=PATIENCE_S)
    both, single = (list(loss_file.read(next((folder / "runs").iterdir()))) for folder in (cwd, alone))
    assert len(single) == 23
    assert both == pytest.approx(single, rel=0, abs=ROUNDED)


def test_a_link_that_is_slowed_in_the_middle_shows_as_a_spike(nodes: Nodes, cwd: Path) -> None:
    # A quarter of a megabyte of gradients in 150 steps of 20 ms; at 1 Mbit/s it takes two seconds to exchange them.
    larger = ["model={_target_: lab.Sluggish, ms: 20.0, width: 256}", "data={_target_: lab.points, samples: 800}"]
    with torchrun(nodes, cwd, *DDP, *larger, "train.epochs=3", "checkpoint.keep=0", "--train-only") as ranks:

        def has_reported(times: int) -> bool:
            return len(ranks.series("time/window_communication_ms")) >= times

        ranks.wait_for(lambda: has_reported(CALM_REPORTS), what="calm reports")
        nodes.shape(1, 1)
        slowed_at = ranks.losses[-1][0]
        try:
            ranks.wait_for(lambda: has_reported(CALM_REPORTS + 2), what="slow reports")
        finally:
            nodes.shape(1, None)
        ends = ranks.ended()
    assert [end.code for end in ends] == [0, 0], ends
    told = [event.message for event in ranks.all_of(Warned) if "gradient synchronization" in event.message]
    (finished,) = ranks.all_of(Finished)
    worst = finished.result.communication.worst
    assert worst.first_step > slowed_at - 10
    assert not worst.is_late
    assert any("on all ranks, longest on rank" in message for message in told)
    assert f"on {nodes.name(worst.rank)}" in worst.sentence


@pytest.mark.parametrize("told", [0, 1], ids=["driver", "other"])
def test_sigterm_to_one_rank_leaves_a_checkpoint_and_one_node_resumes(
    told: int, nodes: Nodes, cwd: Path, alone: dict[int, float]
) -> None:
    with tasks(nodes, cwd) as ranks:
        ranks.wait_for_step(20)
        _signal_rank(nodes, told, signal.SIGTERM)
        ends = ranks.ended()
    assert [end.code for end in ends] == [143, 143], ends
    saved = max(event.step for event in ranks.all_of(CheckpointSaved))
    assert saved == ranks.losses[-1][0] < STEPS
    assert [event.status for event in ranks.all_of(RunClosed)] == ["KILLED"]
    done = subprocess.run(
        run_line(*TRAINING, *OFTEN, "--resume"),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [event.step for event in ranks.all_of(Resumed)] == [saved]
    assert dict(ranks.losses) == pytest.approx(alone, rel=0, abs=EXACT)


def test_killed_node_is_named_and_two_others_resume(nodes: Nodes, cwd: Path, alone: dict[int, float]) -> None:
    with tasks(nodes, cwd) as ranks:
        ranks.wait_for_step(20)
        nodes.kill(1)
        ended, _ = ranks.ended()
    assert ended.code == 1, ended.output
    assert "rank 1 on node1 exited without reporting an error: its process was killed or crashed" in ended.stderr
    assert "Traceback" not in ended.output
    with tasks(nodes, cwd, "--resume") as ranks:
        ends = ranks.ended()
    assert [end.code for end in ends] == [0, 0], ends
    assert dict(ranks.losses) == pytest.approx(alone, rel=0, abs=EXACT)


def test_node_that_is_cut_off_is_named(nodes: Nodes, cwd: Path) -> None:
    with tasks(nodes, cwd, "parallel.timeout_s=10") as ranks:
        ranks.wait_for_step(20)
        nodes.cut(1)
        try:
            ended = ranks.processes[0].communicate(timeout=PATIENCE_S)
        finally:
            nodes.heal(1)
    assert ranks.processes[0].returncode == 1, ended
    assert "rank 1 on node1" in ended[1]
    assert "unreachable" in ended[1]


def _signal_rank(nodes: Nodes, node: int, number: int) -> None:
    """Send a signal to the task of a node, which may have a worker and a writer to MLflow below it."""
    tasks = [each for each in nodes.processes(node) if each.parent() is not None and _is_task(each.cmdline())]
    (task,) = [each for each in tasks if each.parent() not in tasks]
    task.send_signal(number)


def _is_task(line: list[str]) -> bool:
    return line[1:4] == ["-m", "pipeline", "run"]
