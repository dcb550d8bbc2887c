"""Who gets which node and how many GPUs, as far as it is decided before anything starts."""

from pathlib import Path

import pytest

from pipeline.commands.options import with_address
from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
TWO_NODES = Resources(cpus=8, memory_mb=4096, gpus=("GPU",) * 8, node="Ray cluster at head:6379", nodes=2)


def plan(*overrides: str) -> Plan:
    return make_plan(load(MLP, ["parallel.launcher=ray", *overrides]).experiment, TWO_NODES, with_baseline=False)


def test_dp_gets_the_gpus_that_it_asks_for() -> None:
    one_worker = ["parallel.strategy=dp", "parallel.workers=1"]
    assert plan(*one_worker).main.devices_per_worker == 4  # all of a node
    assert plan(*one_worker, "parallel.gpus_per_worker=2").main.devices_per_worker == 2


def test_ddp_uses_one_gpu_per_worker() -> None:
    assert plan("parallel.gpus_per_worker=1").main.devices_per_worker == 1
    with pytest.raises(ExperimentError, match=r"parallel\.gpus_per_worker: is 2, but ddp uses one GPU per worker"):
        plan("parallel.gpus_per_worker=2")


def test_the_address_counts_as_written_last() -> None:
    overrides = with_address(["parallel.address=elsewhere:1", "parallel.launcher=torchrun"], "[fd00::1]:6379")
    parallel = load(MLP, overrides).experiment.parallel

    assert (parallel.address, parallel.launcher) == ("[fd00::1]:6379", "ray")
    assert with_address(None, None) == []
