"""A cluster that other jobs use, too: how large a sweep on it is. test_sweep_trials.py has trials that find no room."""

# promise: a sweep on a shared cluster is sized by what is free, a lack of room is no result

from pathlib import Path

import pytest

from pipeline.commands.sweep_trial import find_concurrency
from pipeline.errors import ResourceError
from pipeline.experiment.load import ExperimentFile, load
from pipeline.plan.resources import Resources

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"


def find(file: ExperimentFile, resources: Resources) -> tuple[int, int]:
    """Find the concurrency of a file's sweep."""
    sweep = file.experiment.sweep
    assert sweep is not None
    return find_concurrency(file, resources, allowed=(), total=sweep.total, asked=sweep.concurrent)


@pytest.mark.parametrize(
    ("free", "concurrent", "expected"),
    [
        ((4, 4), None, (4, 2)),  # without other jobs, cores that would be idle are distributed
        ((1, 2), None, (3, 1)),
        ((4, 1), "2", (2, 2)),  # 2 workers with 2 cores fit on the first node
        ((0, 0), None, (1, 1)),
        ((0, 0), "8", (8, 1)),  # as written; they wait for room
    ],
)
def test_a_sweep_counts_what_is_free_now(
    free: tuple[int, ...], concurrent: str | None, expected: tuple[int, int]
) -> None:
    more = [f"sweep.concurrent={concurrent}"] if concurrent else []
    sweep = 'sweep={"parameters": {"optimizer.lr": {"log_uniform": [0.1, 1]}}, "trials": 4}'
    trials = ["sweep.trials=8"] if concurrent == "8" else []
    file = load(MLP, ["parallel.launcher=ray", "parallel.workers=1", sweep, *more, *trials])
    idle = tuple({"CPU": float(cpus)} if cpus else {} for cpus in free)
    there = Resources(cpus=8, memory_mb=1, nodes=2, idle=idle)

    assert find(file, there) == expected


@pytest.mark.parametrize("idle", [(), ({"CPU": 1.0},)])
def test_a_sweep_may_ask_an_autoscaler_for_more_than_there_is(idle: tuple[dict[str, float], ...]) -> None:
    sweep = 'sweep={"parameters": {"optimizer.lr": {"log_uniform": [0.1, 1]}}, "trials": 8, "concurrent": 4}'
    file = load(MLP, ["parallel.launcher=ray", "parallel.device=cpu", "parallel.workers=1", sweep])
    there = Resources(cpus=len(idle), memory_mb=1, idle=idle, is_autoscaled=True)

    assert find(file, there) == (4, 1)
    with pytest.raises(ResourceError, match="don't fit at the same time"):
        find(file, Resources(cpus=1, memory_mb=1, idle=({"CPU": 1.0},)))
