"""What does not fit on a cluster now is planned where nodes can be added."""

# promise: an autoscaler is asked for nodes; Ray's own

import toys

from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources

EMPTY = Resources(cpus=0, memory_mb=0, node="Ray cluster at head:6379", is_autoscaled=True)
HEAD = Resources(cpus=4, memory_mb=4096, node="Ray cluster at head:6379", is_autoscaled=True)
GPUS = Resources(cpus=8, memory_mb=4096, gpus=("GPU",) * 2, node="Ray cluster at head:6379", is_autoscaled=True)
TWO = {"strategy": "ddp", "launcher": "ray", "workers": 2}


def plan(there: Resources, **parallel: object) -> Plan:
    return make_plan(toys.experiment(parallel={**TWO, **parallel}), there, allowed=("toys",), with_baseline=True)


def test_what_does_not_fit_is_planned_where_nodes_can_be_added() -> None:
    made = plan(EMPTY, device="cpu", cpus_per_worker=4)
    assert (made.main.workers, made.main.cpus_per_worker) == (2, 4)
    assert "Room for 0 of 2 workers is free. The cluster's autoscaler may add nodes." in made.notes
    assert "reference" not in [trial.role for trial in made.measured]  # no node may have the cores of both
    assert plan(EMPTY, device="cuda", strategy="dp", workers=1).main.devices_per_worker == 1
    assert plan(GPUS, workers=4).main.device == "cuda"
    assert plan(HEAD, workers=[1, 9], cpus_per_worker=4).main.workers == 1
    assert not [note for note in plan(HEAD).notes if "room" in note]


def test_a_device_that_is_not_set_is_that_of_the_nodes_there_are() -> None:
    assert "No GPU found. Training on the CPU." in plan(HEAD, cpus_per_worker=4).notes
