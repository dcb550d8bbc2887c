"""Training across real Ray nodes: each has its own network, host name and storage.

Nodes 0 and 1 have the custom resource ``even``. Node 2 is another machine: it has neither our torch nor our release.
Machine 3 is connected to them, but no node.
"""

# promise: an existing Ray cluster; several nodes
# promise: a node that can't have workers is left out while others have room; new nodes are checked during training

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import Nodes
from projects import PATIENCE_S, Ran, project, run

from pipeline.protocol.events import Finished, Started, Warned

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-12
SLOW_MBIT = 20
OTHER_TORCH, OTHER_RELEASE = "2.9.1", "0.0.9"
WIDE = ["train.precision=fp64", "model={_target_: lab.Talkative, ms: 0, width: 256}", "checkpoint.keep=0"]
"""Half a megabyte of gradients, which a slow link can hold up."""
TWO = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.placement=strict_spread"]
LARGE = "parallel.cpus_per_worker=2"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    other = tmp_path_factory.mktemp("other")
    (other / "torch").mkdir()
    (other / "torch" / "__init__.py").touch()
    (other / "torch" / "version.py").write_text(f"__version__ = '{OTHER_TORCH}'\n")
    release = other / f"ddp_pipeline-{OTHER_RELEASE}.dist-info"
    release.mkdir()
    (release / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddp-pipeline\nVersion: {OTHER_RELEASE}\n")
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
    """Two workers, each on a node of its own, of which the second has neither the code nor the run's folder."""
    return run(nodes, on_the_head, *TWO, LARGE, *WIDE)


def test_two_nodes_train_what_one_process_does(
    trained: Ran, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    assert trained.code == 0, trained.output
    alone = project(tmp_path / "alone", tracked=False)
    process = start("run", "lab.yaml", "--no-baseline", *WIDE, cwd=alone)
    output = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    (folder,) = (alone / "runs").iterdir()
    expected = Ran(0, *output, folder).losses

    assert sorted(node.split()[0] for node in started(trained).devices) == ["node0", "node1"]
    assert len(expected) == started(trained).total_steps
    assert len(set(expected.values())) == len(expected)
    assert trained.losses == pytest.approx(expected, rel=0, abs=EXACT)


def test_the_code_was_sent_there(trained: Ran) -> None:
    """Its size is said; nothing else is on the terminal's error stream."""
    assert re.fullmatch(r"sending 3 files, \d+ kB, to the cluster\n", trained.stderr)


def test_what_far_ranks_print_comes_to_the_run(trained: Ran) -> None:
    assert trained.folder is not None
    logs = [(trained.folder / "logs" / "main" / f"rank{rank}-stdout.log").read_text() for rank in (0, 1)]

    assert sorted(logs) == ["computing on node0\n", "computing on node1\n"]


def test_a_slow_link_is_exposed_communication(nodes: Nodes, on_the_head: Path, trained: Ran) -> None:
    nodes.shape(1, SLOW_MBIT)
    try:
        slow = run(nodes, on_the_head, *TWO, LARGE, *WIDE)
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


def test_a_node_of_another_make_is_left_out_while_the_others_have_room(nodes: Nodes, on_the_head: Path) -> None:
    there = f"node2 ({nodes.host(2)}): it has"
    ran = run(nodes, on_the_head, *TWO, *WIDE)

    assert ran.code == 0, ran.output
    assert sorted(node.split()[0] for node in started(ran).devices) == ["node0", "node1"]
    warnings = [event.message for event in ran.events if isinstance(event, Warned)]
    assert sum(there in warning for warning in warnings) == 2
    assert any(
        f"no workers are placed on {there} torch {OTHER_TORCH}, and this machine has 2." in each for each in warnings
    )

    refused = run(nodes, on_the_head, *TWO, "parallel.workers=3")
    assert refused.code == 3
    assert refused.folder is None
    assert "strict_spread needs a node for each of 3 workers" in refused.stderr
    assert f"{there} torch {OTHER_TORCH}, and this machine has 2." in refused.stderr
    assert (
        f"{there} ddp-pipeline {OTHER_RELEASE}, and this machine has 0.1.0. On that node, install it from"
        in refused.stderr
    )
    assert "node1" not in refused.stderr


def test_all_that_nodes_lack_is_said_at_once(nodes: Nodes, on_the_head: Path) -> None:
    refused = run(nodes, on_the_head, *TWO)

    assert refused.code == 3
    far = f"node1 ({nodes.host(1)}): "
    assert f"node2 ({nodes.host(2)}): it has torch {OTHER_TORCH}" in refused.stderr
    assert f"{far}checkpoints go to {nodes.private}/project/runs/" in refused.stderr
    assert "Set checkpoint.directory to a folder that all nodes share" in refused.stderr
    assert "Traceback" not in refused.output


def test_a_machine_without_ray_is_told_how_to_join(nodes: Nodes) -> None:
    refused = run(nodes, project(nodes.storage(3) / "project", tracked=True), node=3)

    assert refused.code == 3
    assert refused.stderr == (
        f"error: this machine is not a node of the Ray cluster at {nodes.address}. Its nodes are {nodes.host(0)}, "
        f"{nodes.host(1)}, {nodes.host(2)}. Add this machine with ray start --address={nodes.address} --num-cpus=0, or "
        "send the run with ray job submit.\n"
    )


def started(ran: Ran) -> Started:
    return next(event for event in ran.events if isinstance(event, Started))


def finished(ran: Ran) -> Finished:
    return next(event for event in ran.events if isinstance(event, Finished))
