"""Training across real Ray nodes: each has its own network, host name and storage.

Nodes 0 and 1 have the custom resource ``even``. Node 2 is another machine: it has neither our torch nor our release.
Machine 3 is connected to them, but no node.
"""

# promise: an existing Ray cluster; several nodes
# promise: a node with other versions or without the shared folder is named, and nothing is trained

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import PATIENCE_S, Recording
from nodes import Nodes
from projects import Ran, project, run

from pipeline.protocol.events import Finished, Started

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-12
SLOW_MBIT = 20
OTHER_TORCH = "2.9.1"
WIDE = ["train.precision=fp64", "model={_target_: lab.Talkative, ms: 0, width: 256}", "checkpoint.keep=0"]
"""Half a megabyte of gradients, which a slow link can hold up."""
TWO = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.placement=strict_spread"]
LARGE = "parallel.cpus_per_worker=2"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    other = tmp_path_factory.mktemp("other")
    installed = other / f"torch-{OTHER_TORCH}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OTHER_TORCH}\n")
    with Nodes(4, started=False) as nodes:
        for node in (0, 1):
            nodes.start(node, cpus=2)
        nodes.start(2, cpus=1, env={"PYTHONPATH": str(other)})
        nodes.await_nodes(3)
        yield nodes


@pytest.fixture(scope="module")
def on_the_head(nodes: Nodes) -> Path:
    """A project that only the head's own disk has."""
    return project(nodes.storage(0) / "project", tracked=True)


@pytest.fixture(scope="module")
def trained(nodes: Nodes, on_the_head: Path) -> Ran:
    """Two workers, each on a node of its own, of which the second has no code; both have the run's folder."""
    return run(nodes, on_the_head, *TWO, LARGE, *WIDE, runs=nodes.folder / "shared")


def test_two_nodes_train_what_one_process_does(
    trained: Ran, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    assert trained.code == 0, trained.output
    alone = project(tmp_path / "alone", tracked=False)
    process = start("run", "lab.yaml", "--no-baseline", *WIDE, cwd=alone)
    output = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    (folder,) = (alone / "runs").iterdir()
    expected = dict(Recording(folder).losses)

    assert sorted(node.split()[0] for node in started(trained).devices) == ["node0", "node1"]
    assert len(expected) == started(trained).total_steps
    assert len(set(expected.values())) == len(expected)
    assert dict(trained.losses) == pytest.approx(expected, rel=0, abs=EXACT)


def test_what_far_ranks_print_comes_to_the_run(trained: Ran) -> None:
    logs = [(trained.folder / "logs" / "main" / f"rank{rank}-stdout.log").read_text() for rank in (0, 1)]

    assert sorted(logs) == ["computing on node0\n", "computing on node1\n"]


def test_a_slow_link_is_exposed_communication(nodes: Nodes, on_the_head: Path, trained: Ran) -> None:
    nodes.shape(1, SLOW_MBIT)
    try:
        slow = run(nodes, on_the_head, *TWO, LARGE, *WIDE, runs=nodes.folder / "shared")
    finally:
        nodes.shape(1, None)
    assert slow.code == 0, slow.output

    fast, held_up = (finished(ran).result.parts for ran in (trained, slow))
    assert fast.exposed_communication_ms is not None
    assert held_up.exposed_communication_ms is not None
    assert held_up.exposed_communication_ms > 5 * fast.exposed_communication_ms
    assert held_up.held_ms is not None
    assert held_up.exposed_communication_ms > 0.8 * held_up.held_ms.median
    assert sorted(held_up.nodes) == ["node0", "node1"]


def test_a_node_of_another_make_ends_the_run_and_is_named(nodes: Nodes, on_the_head: Path) -> None:
    refused = run(nodes, on_the_head, *TWO, *WIDE, "parallel.workers=3", runs=nodes.folder / "shared")

    assert refused.code == 3, refused.output
    assert f"node2 can't run workers: it has torch {OTHER_TORCH}, and the driver has 2." in refused.stderr
    assert "Traceback" not in refused.output


def test_a_node_without_the_run_s_folder_is_named(nodes: Nodes, on_the_head: Path) -> None:
    refused = run(nodes, on_the_head, *TWO, LARGE)

    assert refused.code == 3, refused.output
    assert f"node1 can't run workers: {nodes.private}/project/runs/" in refused.stderr
    assert "Set tracking.directory to a folder that all nodes share." in refused.stderr
    assert "Traceback" not in refused.output


def test_a_machine_without_ray_is_told_how_to_join(nodes: Nodes) -> None:
    refused = run(nodes, project(nodes.storage(3) / "project", tracked=True), node=3)

    assert refused.code == 3
    assert refused.stderr == (
        f"error: this machine is not a node of the Ray cluster at {nodes.address}. Add it with ray start "
        f"--address={nodes.address} --num-cpus=0, or send the run with ray job submit.\n"
    )


def started(ran: Ran) -> Started:
    return next(event for event in ran.events if isinstance(event, Started))


def finished(ran: Ran) -> Finished:
    return next(event for event in ran.events if isinstance(event, Finished))
