"""The launchers that start this command as several processes: their variables, and what contradicts them."""

# promise: variables of torchrun and srun; those that contradict are named; resources and versions of all ranks

import pytest
from outer import outer_torchrun, srun

from pipeline.errors import UsageError
from pipeline.plan.outer_launcher import OuterLauncher, outer_launcher


def found(variables: dict[str, str]) -> OuterLauncher:
    outer = outer_launcher(variables)
    assert outer is not None
    return outer


def place(outer: OuterLauncher) -> tuple[int, int, int, int]:
    return outer.rank, outer.world_size, outer.local_rank, outer.local_world_size


def test_torchrun() -> None:
    outer = found(outer_torchrun(3, 4, local_world_size=2, host="node0", port=29400))
    assert (outer.name, outer.host, outer.port, outer.has_store) == ("torchrun", "node0", 29400, True)
    assert place(outer) == (3, 4, 1, 2)
    assert outer.has_several_nodes
    assert not outer.is_driver


def test_srun_on_several_nodes() -> None:
    variables = srun(4, 6, host="gpu007", per_node="2(x2),2", node=2, local_rank=0)
    outer = found(variables)
    assert place(outer) == (4, 6, 0, 2)
    assert (outer.name, outer.host, outer.has_store) == ("srun", "gpu007", False)
    same_job = found(srun(0, 6, host="gpu007", per_node="2(x2),2"))
    assert same_job.port == outer.port != found(srun(0, 6, host="gpu007", per_node="2(x2),2", job=4712)).port
    assert 20000 <= outer.port < 30000
    told = found({**variables, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29411"})
    assert (told.host, told.port) == ("10.0.0.7", 29411)


def test_srun_counts_the_tasks_of_each_node_and_of_its_step() -> None:
    assert place(found(srun(3, 4, host="a", per_node="3,1", node=1, local_rank=0))) == (3, 4, 0, 1)
    assert found(srun(1, 2)).host == "127.0.0.1"  # on one node it stays on loopback
    assert found({**srun(1, 2), "SLURM_NTASKS": "8"}).world_size == 2  # `srun --preserve-env` leaves the job's


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"},
        srun(0, 1),  # srun -n 1, or the shell of salloc if it is a step
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # the shell of salloc
        {name: value for name, value in srun(0, 4).items() if "STEP" not in name},  # a batch script
    ],
    ids=["none", "some variables", "one task", "salloc", "batch script"],
)
def test_process_that_is_alone_changes_nothing(variables: dict[str, str]) -> None:
    assert outer_launcher(variables) is None


def test_srun_with_pmi_is_srun_and_torchrun_within_srun_is_torchrun() -> None:
    assert found({**srun(1, 2), "PMI_RANK": "1", "PMI_SIZE": "2"}).name == "srun"
    outer = found({**srun(1, 2, per_node="1(x2)", node=1, local_rank=0), **outer_torchrun(5, 8)})
    assert (outer.name, outer.rank) == ("torchrun", 5)


def test_variables_of_torch_are_those_of_every_launcher() -> None:
    task = srun(5, 8, host="node0", per_node="4(x2)", node=1, local_rank=1)
    outer = found({**task, "MASTER_PORT": "29400"})
    assert outer.variables == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29400",
    }
    assert outer_launcher({**task, **outer.variables}) == outer


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (without(outer_torchrun(), "LOCAL_RANK"), "started by torchrun, but LOCAL_RANK is not set"),
        (without(outer_torchrun(), "MASTER_PORT"), "started by torchrun, but MASTER_PORT is not set"),
        ({**outer_torchrun(), "RANK": "two"}, "started by torchrun, but RANK=two is not a number"),
        ({**outer_torchrun(), "RANK": "2"}, "RANK=2 and WORLD_SIZE=2 contradict each other"),
        ({**outer_torchrun(), "LOCAL_RANK": "3"}, "LOCAL_RANK=3 and LOCAL_WORLD_SIZE=2 contradict each other"),
        (without(srun(), "SLURM_LOCALID"), "started by srun, but SLURM_LOCALID is not set"),
        (without(srun(), "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "started by srun, but SLURM_NTASKS is not set"),
        ({**srun(), "SLURM_PROCID": "7"}, "SLURM_PROCID=7 and SLURM_STEP_NUM_TASKS=2 contradict each other"),
        ({**srun(1), "RANK": "0"}, "RANK=0 and SLURM_PROCID=1 contradict each other; unset RANK"),
        ({**srun(), "WORLD_SIZE": "1"}, "WORLD_SIZE=1 and SLURM_STEP_NUM_TASKS=2 contradict each other"),
        ({**srun(), "SLURM_NODEID": "3"}, "SLURM_NODEID=3 is no node of SLURM_STEP_TASKS_PER_NODE=2"),
        (srun(per_node="1(x2)"), "but MASTER_ADDR, the name of the first one, is not set"),
    ],
)
def test_variables_that_are_missing_or_contradict_are_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        outer_launcher(variables)
    assert said in str(raised.value)
