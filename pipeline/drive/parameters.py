"""Check of the keys that name parameters, on a model without memory: ``train.start_from``, ``.freeze``, groups.

A model that can't be built so, or that needs run-time values, is checked by the workers, with the same errors.
"""

import logging
from functools import partial

from pipeline.drive import initial_weights
from pipeline.errors import ExperimentError, Problem, refusals
from pipeline.experiment import components, references
from pipeline.experiment.schema import Experiment
from pipeline.protocol.trial import Weights
from pipeline.system.imports import undisturbed

_log = logging.getLogger(__name__)


def problems(experiment: Experiment, *, allowed: tuple[str, ...], with_weights: bool = True) -> list[Problem]:
    """Find patterns that match no parameter, and weights that don't exist or don't fit.

    Args:
        experiment: the experiment.
        allowed: packages that it may name.
        with_weights: False if the weights to start from need not be there, e.g. as a checkpoint has them.
    """
    found: list[Problem] = []
    initial: Weights | None = None
    if with_weights:
        try:
            initial = initial_weights.find(experiment)
        except ExperimentError as error:
            found += error.problems
    if initial is not None or experiment.train.freeze or _names_parameters(experiment):
        found += _mismatches(experiment, initial, allowed=allowed)
    return found


def _names_parameters(experiment: Experiment) -> bool:
    """Return True if optimizers have patterns of parameter names."""
    return bool(experiment.optimizers or (experiment.optimizer is not None and experiment.optimizer.groups))


def _mismatches(experiment: Experiment, initial: Weights | None, *, allowed: tuple[str, ...]) -> list[Problem]:
    with undisturbed():
        from pipeline.train import optim, parts, weights

    create = partial(components.build, allowed=allowed)
    start = experiment.train.start_from
    try:
        trainee = parts.outline(create, references.fill_in(experiment), with_task=_names_parameters(experiment))
    except Exception as error:  # noqa: BLE001 - user code; the workers raise what remains
        _log.info("the model can't be built without memory, so its parameters are checked later", exc_info=error)
        return []
    found: list[Problem] = []
    if start is not None and initial is not None:
        found += refusals(lambda: weights.fit(trainee.get_submodule("model"), start, initial))
    found += refusals(lambda: optim.freeze(trainee, experiment.train.freeze))
    return found + refusals(lambda: optim.divide(experiment, trainee))
