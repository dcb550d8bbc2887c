"""Resources of all ranks of an outer launcher, and the plan that follows from them."""

# promise: each rank of srun has a GPU that it sees; an export fits into a container
# promise: variables of torchrun and srun; those that contradict are named; resources and versions of all ranks

import socket
from typing import Any

import pytest
import torch
import toys

from pipeline.errors import ResourceError
from pipeline.launch.node_facts import RankFacts, combine_facts, find_gpus, refuse_others
from pipeline.launch.outer import Group
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.plan.plan import Planner, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Rank, Reference, Training
from pipeline.train.ranks import device_of

VERSIONS = {"Python": "3.11", "torch": "2.13.0"}


def rank(number: int, *, node: str = "a", cores: tuple[int, ...] = (0, 1, 2, 3), **more: object) -> RankFacts:
    own = {"gpus": {}, "versions": VERSIONS, "cpus": len(cores), "address": "10.0.0.1"} | more
    resources = Resources(cpus=own.pop("cpus"), memory_mb=4096, node=node, processor="EPYC")
    return RankFacts(rank=number, resources=resources, cores=cores, **own)


def shared(*counts: int) -> list[RankFacts]:
    """Make equally many ranks on each node, all of which may use all cores, as under torchrun."""
    places = [node for node, count in zip("abc", counts, strict=False) for _ in range(count)]
    return [rank(number, node=node) for number, node in enumerate(places)]


def test_cores_count_once_where_ranks_share_them_and_add_up_where_srun_has_bound_them() -> None:
    there = combine_facts(shared(2, 2))
    assert (there.cpus, there.nodes, there.memory_mb, there.node) == (8, 2, 8192, "a, b")
    assert [(node.node, node.workers, node.cpus) for node in there.placed] == [("a", 2, 4), ("b", 2, 4)]
    assert not there.is_divided
    bound = combine_facts([rank(0, cores=(0, 1)), rank(1, cores=(2, 3))])
    assert (bound.cpus, bound.nodes, bound.placed[0].cpus) == (4, 1, 4)
    assert bound.is_divided
    limited = combine_facts([rank(0, cores=tuple(range(64)), cpus=4)])  # by a container
    assert (limited.cpus, limited.placed[0].cpus) == (4, 4)
    namesakes = combine_facts([rank(0), rank(1, address="10.0.0.2")])  # machines of the same name are two
    assert (namesakes.nodes, namesakes.cpus) == (2, 8)


def test_gpus_that_several_ranks_see_count_once() -> None:
    all_of_node = {"GPU-1": "H100", "GPU-2": "H100"}
    both = combine_facts([rank(0, gpus=all_of_node), rank(1, gpus=all_of_node)])
    own = combine_facts([rank(0, gpus={"GPU-1": "H100"}), rank(1, gpus={"GPU-2": "H100"})])
    assert both.gpus == own.gpus == ("H100", "H100")


@pytest.mark.parametrize(
    ("visible", "each", "indices"),
    [
        (["abcd", "abcd", "abcd", "abcd", "efgh", "efgh"], 1, (0, 1, 2, 3, 0, 1)),  # torchrun, on two nodes
        (["abcd", "abcd", "efgh"], 2, (0, 2, 0)),
        (["a", "b", "c"], 1, (0, 0, 0)),  # srun --gpus-per-task=1
        (["ab", "cd", "ab", "cd"], 1, (0, 0, 1, 1)),  # --gpu-bind=closest, tasks by turns on two sockets
        (["ab", "ba"], 1, (0, 0)),
        (["ab", "ab", "ab"], 1, (0, 1, None)),
        (["", ""], 1, (None, None)),
    ],
)
def test_each_rank_gets_a_gpu_that_it_sees_and_no_other_rank_has(
    visible: list[str], each: int, indices: tuple[int | None, ...]
) -> None:
    facts = [rank(number, gpus=dict.fromkeys(seen, "H100")) for number, seen in enumerate(visible)]
    assert find_gpus(facts, each=each) == indices


def test_a_rank_uses_the_gpu_that_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    trial = toys.trial().model_copy(update={"device": "cuda", "devices_per_worker": 1})
    where = Rank(rank=2, world_size=4, local_rank=2, local_world_size=4)
    assert device_of(trial, rank=where.model_copy(update={"gpu": 1})) == torch.device("cuda", 1)
    with pytest.raises(ResourceError, match=r"rank 2 on .* has no GPU: CUDA shows 2 GPUs to 4 ranks"):
        device_of(trial, rank=where)


def test_versions_that_differ_are_refused_once_for_each_node() -> None:
    other = {**VERSIONS, "torch": "2.9.1"}
    with pytest.raises(ResourceError) as raised:
        refuse_others([
            rank(0),
            rank(1, node="b", versions=other),
            rank(2, node="b", versions=other),
        ])  # fmt: skip
    assert str(raised.value) == (
        "versions differ from rank 0's on a. Install the same versions on all nodes:\n"
        "b: it has torch 2.9.1, and rank 0 has 2.13.0"
    )
    refuse_others(shared(2, 2))


def outer(**more: Any) -> OuterLauncher:
    places = {"rank": 0, "world_size": 4, "local_rank": 0, "local_world_size": 2}
    return OuterLauncher(**{"name": "srun", "host": "a", "port": 1, **places, **more})


def group(number: int = 0, *, port: int, timeout_s: float = 30) -> Group:
    return Group(outer(rank=number, host="127.0.0.1", port=port, local_world_size=4), timeout_s=timeout_s)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_ranks_that_did_not_come_are_named() -> None:
    lead = group(port=free_port(), timeout_s=0.2)
    lead.publish()
    with pytest.raises(ResourceError, match=r"0.2 s\): rank 1, 2, 3$"):
        lead.gather()


def planned(there: Resources, *, workers: int, **parallel: object) -> Training:
    experiment = toys.trial(parallel={"strategy": "ddp", "launcher": "torchrun", "workers": workers, **parallel})
    main = make_plan(experiment.experiment, there, with_baseline=False).main
    assert isinstance(main, Training)
    return main


def test_each_worker_gets_the_share_of_the_fullest_node_and_an_elastic_training_all_that_were_started() -> None:
    assert planned(combine_facts(shared(1, 2)), workers=3).cpus_per_worker == 2
    assert planned(combine_facts(shared(2, 1)), workers=[1, 4]).workers == 3  # type: ignore[arg-type]


def test_more_cores_than_a_node_has_are_refused() -> None:
    crowded = [rank(0), *(rank(1 + i, node="b", cores=(0,)) for i in range(2))]
    with pytest.raises(ResourceError, match="2 workers with 1 core each were started on b, where they may use 1 core"):
        planned(combine_facts(crowded), workers=3)
    small = combine_facts([rank(0), rank(1, node="b", cores=(0, 1))])
    with pytest.raises(ResourceError, match="1 worker with 3 cores each were started on b"):
        planned(small, workers=2, cpus_per_worker=3)


def test_one_process_is_no_reference_for_all_cores_if_it_may_not_use_them() -> None:
    experiment = toys.trial(parallel={"strategy": "ddp", "launcher": "torchrun", "workers": 2}).experiment
    bound = combine_facts([rank(0, cores=(0,)), rank(1, cores=(1,))])
    free = combine_facts([rank(0, cores=(0, 1)), rank(1, cores=(0, 1))])

    def measured(there: Resources) -> list[str]:
        return [trial.role for trial in make_plan(experiment, there).measured]

    assert "reference" not in measured(bound)
    assert "reference" in measured(free)
    assert Reference.model_fields["role"].default == "reference"
    assert Planner(experiment, bound, ()).workers == 2
