"""Nodes of a cluster that can't have workers are left out, while the others have room."""

# promise: a node that can't have workers is left out while others have room; new nodes are checked during training

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import toys
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Parallel
from pipeline.launch.cluster import checks, fit_nodes, join, nodes, placement
from pipeline.launch.cluster.code import Code
from pipeline.launch.cluster.fit_nodes import Check, FitNodes
from pipeline.launch.cluster.node_check import Answer, check_node
from pipeline.launch.cluster.node_facts import NodeFacts, facts_here
from pipeline.launch.ray import _how, _losses
from pipeline.plan.resources import format_unfit

HERE = facts_here()
SILENT = "it didn't answer within 60 s"
OTHER = HERE.model_copy(update={"ray": "2.9.0"})
VERSION = f"it has ray 2.9.0, and this machine has {HERE.ray}. On that node: pip install ray=={HERE.ray}"
STORAGE = Answer(storage="the storage is not shared")


class Cluster:
    """Nodes that answer as they are told to; each has room for a worker."""

    def __init__(self, *names: str) -> None:
        self.names = [*names]
        self.facts: dict[str, NodeFacts | None] = {}
        self.answers: dict[str, Answer | None] = {}
        """None: the node is silent."""
        self.is_quick = True
        self.is_autoscaled = False
        self.asked: list[list[str]] = []
        self.question = ""
        """The latest one, in JSON."""
        self.warnings: list[str] = []

    def records(self) -> list[dict[str, object]]:
        place = {"NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 1, "Resources": {"CPU": 1.0, "memory": 1e9}}
        return [{"NodeID": name, "NodeManagerHostname": name, **place} for name in self.names]

    def check(self, *workers: int) -> Check:
        trial = toys.trial(parallel={"workers": [workers[0], workers[-1]]}).model_copy(update={"workers": workers[-1]})
        return Check(trial, None, self.warnings.append)


class Question:
    """A question that the nodes of a `Cluster` answer."""

    def __init__(
        self, cluster: Cluster, texts: dict[str, NodeFacts | None] | dict[str, Answer | None], default
    ) -> None:
        self._cluster = cluster
        self._all = {node: texts.get(node, default) for node in cluster.asked[-1]}

    def is_answered(self) -> bool:
        return self._cluster.is_quick

    def answers(self) -> tuple[dict[str, str], dict[str, str]]:
        said = {node: text.model_dump_json() for node, text in self._all.items() if text is not None}
        return said, dict.fromkeys(self._all.keys() - said, SILENT)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster("a", "b", "c")

    def asked(names, texts, default) -> Question:
        cluster.asked.append([*names])
        return Question(cluster, texts, default)

    for module in (placement, fit_nodes):
        monkeypatch.setattr(module, "usable_nodes", cluster.records)
    for module in (checks, join):
        monkeypatch.setattr(module, "ask_facts", lambda names: asked(names, cluster.facts, HERE))

    def question(_, text: str, *, nodes) -> Question:
        cluster.question = text
        return asked(nodes, cluster.answers, Answer())

    monkeypatch.setattr(checks, "NodeQuestion", question)
    monkeypatch.setattr(checks.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(join, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(join, "has_autoscaler", lambda: cluster.is_autoscaled)
    monkeypatch.setattr(join, "available_resources_per_node", lambda: {"a": {"CPU": 0.5}, "b": {"CPU": 1.0}})
    return cluster


def fit(cluster: Cluster, **unfit) -> FitNodes:
    return FitNodes(Parallel(), code=Code(), unfit=unfit)


def names(found) -> list[str]:
    return [node["NodeID"] for node in found]


def test_a_plan_counts_the_nodes_that_answer_and_have_our_versions(cluster: Cluster) -> None:
    cluster.facts = {"b": None, "c": OTHER}
    there = join.cluster_resources("10.0.0.1:6379", Parallel())
    assert (there.cpus, there.nodes, there.idle) == (1, 1, ({"CPU": 0.5},))
    assert format_unfit(there.unfit.values()) == [f"b (10.0.0.2): {SILENT}", f"c (10.0.0.2): {VERSION}"]

    cluster.facts |= {"a": OTHER}
    with pytest.raises(ResourceError) as error:
        join.cluster_resources("10.0.0.1:6379", Parallel())
    assert str(error.value).splitlines() == [
        "no node of the cluster can run workers:", f"a (10.0.0.2), c (10.0.0.2): {VERSION}", f"b (10.0.0.2): {SILENT}",
    ]  # fmt: skip


def test_unfit_nodes_are_named_once_and_get_no_workers(cluster: Cluster) -> None:
    cluster.facts = {"c": OTHER}
    planned = join.cluster_resources("10.0.0.1:6379", Parallel()).unfit
    cluster.answers = {"b": STORAGE}
    fitting = fit(cluster, **planned)

    fitting.check(cluster.check(1))
    fitting.check(cluster.check(1))
    assert names(fitting.poll(cluster.check(1))) == ["a"]
    assert fitting.selector() == {"ray.io/node-id": "!in(b,c)"}
    assert cluster.warnings == [
        f"no workers are placed on c (10.0.0.2): {VERSION}",
        "no workers are placed on b (10.0.0.2): checkpoints go to None, and the storage is not shared. Set "
        "checkpoint.directory to a folder that all nodes share, or to an address such as s3://bucket/folder. "
        "checkpoint.keep: 0 saves none.",
    ]
    assert cluster.asked[1:] == [["a", "b"], []]  # those that were left out are not asked again


@pytest.mark.parametrize(("workers", "fits"), [((2,), True), ((3,), False), ((1, 3), True)])
def test_only_too_little_room_is_refused(cluster: Cluster, workers: tuple[int, ...], fits: bool) -> None:
    cluster.answers = {"b": None}
    refusal = rf"nodes of the cluster can't run workers:\nb \(10.0.0.2\): {SILENT}"
    with nullcontext() if fits else pytest.raises(ResourceError, match=refusal):
        fit(cluster).check(cluster.check(*workers))


def test_a_new_node_counts_once_it_has_passed_all_checks(cluster: Cluster) -> None:
    """While the training runs nothing waits for it, and an unfit one doesn't end the training."""
    fitting = fit(cluster)
    fitting.check(cluster.check(1, 9))
    assert fitting.selector() == {}

    cluster.names += ["d", "e"]
    cluster.facts, cluster.is_quick = {"e": OTHER}, False
    assert names(fitting.poll(cluster.check(1, 9))) == ["a", "b", "c"]
    assert fitting.selector() == {"ray.io/node-id": "!in(d,e)"}
    cluster.is_quick = True
    assert names(fitting.poll(cluster.check(1, 9))) == ["a", "b", "c", "d"]
    assert cluster.warnings == [f"no workers are placed on e (10.0.0.2): {VERSION}"]
    fitting.check(cluster.check(1, 9))


def test_an_autoscaler_may_start_the_first_nodes_later(cluster: Cluster) -> None:
    cluster.names, cluster.is_autoscaled = [], True
    there = join.cluster_resources("10.0.0.1:6379", Parallel())
    assert (there.cpus, there.nodes, there.is_autoscaled) == (0, 1, True)

    fitting = fit(cluster)
    fitting.check(cluster.check(2), needs_room=False)
    cluster.names, cluster.answers, cluster.facts = ["a", "b"], {"a": STORAGE}, {"b": OTHER}
    assert names(fitting.poll(cluster.check(2))) == []
    assert len(cluster.warnings) == 2  # versions are compared, although the run has no node yet
    fitting.check(cluster.check(2), needs_room=False)


def test_a_check_without_results_leaves_no_file_among_the_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    """As when a training ends while a new node is being checked."""
    fitting, cluster.is_quick = fit(cluster), False
    fitting.poll(cluster.check(1)._replace(checkpoints=str(tmp_path)))
    assert [*tmp_path.iterdir()]
    fitting.close()
    assert [*tmp_path.iterdir()] == []


def test_new_nodes_that_cannot_be_checked_are_warned_of_once(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = cluster.check(1)._replace(checkpoints=str(tmp_path / "file" / "checkpoints"))
    fitting = fit(cluster)
    assert fitting.poll(check) == fitting.poll(check) == []
    (warning,) = cluster.warnings
    assert "get no workers, because they can't be checked: this machine can't write checkpoints to" in warning


def test_each_node_connects_to_the_driver_while_it_is_checked(cluster: Cluster) -> None:
    def answer() -> str | None:
        return Answer.model_validate_json(check_node(cluster.question)).driver

    cluster.is_quick, cluster.answers = False, {"b": Answer(driver="it can't connect to the driver")}
    fitting = fit(cluster)
    fitting.poll(cluster.check(1))
    assert answer() is None
    cluster.is_quick = True
    assert names(fitting.poll(cluster.check(1))) == ["a", "c"]
    assert cluster.warnings == ["no workers are placed on b (10.0.0.2): it can't connect to the driver"]
    assert re.fullmatch(r"it can't connect to the driver at 127.0.0.1:\d+: Connection refused\. .*", answer() or "")


def test_a_worker_that_cannot_connect_ends_the_run() -> None:
    """It isn't lost: on a restart, the firewall would still be there."""
    unreachable = ResourceError("can't connect to the driver")
    with pytest.raises(ResourceError, match="can't connect"):
        _losses(WorkerGroupError("", {0: RuntimeError(), 1: unreachable}), toys.trial(), silent={})


def test_nodes_that_share_a_problem_are_one_line() -> None:
    here = {name: {"NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.2"} for name in "ab"}
    unfit = checks.find_unfit({"a": [SILENT], "b": [SILENT]}, records=here)
    assert format_unfit(unfit.values()) == [f"a (10.0.0.2), b (10.0.0.2): {SILENT}"]


def test_a_question_is_over_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    canceled = []
    monkeypatch.setattr(nodes, "pinned", lambda *_, **__: SimpleNamespace(remote=lambda: "task"))
    monkeypatch.setattr(nodes.ray, "wait", lambda tasks, **_: ([], tasks))
    monkeypatch.setattr(nodes.ray, "cancel", lambda task, force: canceled.append(task))
    waiting = nodes.NodeQuestion(str, nodes=["a"], timeout_s=60.0)
    assert not waiting.is_answered()
    over = nodes.NodeQuestion(str, nodes=["a"], timeout_s=0.0)
    assert over.is_answered()
    answers, silent = over.answers()
    assert (answers, canceled) == ({}, ["task"])
    assert silent["a"].startswith("it didn't answer within 0 s")


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("The actor died because its node has died. Node Id: 1", "its node ended or is unreachable"),
        ("The actor died because its worker process has died.", "its process was killed (out of memory?) or crashed"),
    ],
)
def test_a_dead_node_is_not_taken_for_a_killed_process(said: str, how: str) -> None:
    assert _how(WorkerHealthCheckFailedError("", failure=RayActorError(error_msg=said))) == how


def test_a_leftover_address_is_named_where_its_cluster_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.1.1.1:6379")
    for parallel, noted in ((Parallel(), True), (Parallel(address="10.1.1.1:6379"), False)):
        with pytest.raises(ResourceError) as caught, join.naming_address(parallel):
            raise ResourceError("no cluster answers")
        assert ("RAY_ADDRESS=10.1.1.1:6379 names this cluster." in caught.value.told) == noted
