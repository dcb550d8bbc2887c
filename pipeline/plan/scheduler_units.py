"""Arguments of a learning-rate scheduler that count steps here, but look like epochs.

Many programs advance a scheduler after each epoch, pipeline does so after each step unless the file says otherwise. The
same numbers then end the schedule within the first epoch, and the rest of the training has next to no learning rate.
"""

from collections.abc import Iterator

from pipeline.experiment import references
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Component

_LENGTHS = ("step_size", "milestones", "T_max", "T_0", "total_iters")
"""Arguments of torch's schedulers that count their advances."""
_FACTOR = 0.99
"""Factor of a rate after each step that leaves less than a thousandth of it after 700 steps."""


def scheduler_units(experiment: Experiment) -> Iterator[str]:
    """Yield a note on each scheduler that advances after each step, with numbers that are no more than the epochs."""
    train = experiment.train
    if train.scheduler_interval != "step" or train.epochs is None:
        return
    experiment = references.fill_in(experiment, mode="show")
    declared = {"scheduler": experiment.scheduler}
    declared |= {f"schedulers.{name}": one for name, one in experiment.schedulers.items()}
    for key, scheduler in declared.items():
        if scheduler is not None and (said := _argument(scheduler, epochs=train.epochs)):
            yield f"{key}.{said}. To count epochs, set train.scheduler_interval to epoch"


def _argument(scheduler: Component, *, epochs: int) -> str:
    """Return the first argument that looks like epochs, and what it does; empty without one."""
    given = scheduler.arguments
    for name in _LENGTHS:
        value = given.get(name)
        counts = value if isinstance(value, list | tuple) else [value]
        if counts and all(isinstance(count, int) and count <= epochs for count in counts):
            return f"{name} is {value}. This counts steps, because the scheduler advances after each step"
    gamma = given.get("gamma")
    if scheduler.target.endswith(".ExponentialLR") and isinstance(gamma, float) and gamma <= _FACTOR:
        return f"gamma is {gamma:g}. The learning rate is multiplied by gamma after each step"
    return ""
