"""Ray Tune's search with Optuna, over the parameters of a sweep."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune.search.optuna import OptunaSearch

from pipeline.commands.study_trials.planning import rounded
from pipeline.commands.study_trials.supervisor import TRIAL
from pipeline.errors import ResourceError
from pipeline.experiment.sweep import Parameter, Sweep
from pipeline.experiment.targets import install_command
from pipeline.experiment.values import Direction


class SweepSearch(OptunaSearch):  # type: ignore[misc]  # Ray has no types
    """Optuna's suggestions, numbered and by dotted key; trials of an earlier session come first.

    Args:
        sweep: what is searched.
        begun: values of the trials that have begun, in order.
        direction: of the sweep's metric.
        seed: of the sampler.

    Raises:
        ResourceError: Optuna is not installed.
    """

    def __init__(self, sweep: Sweep, begun: Sequence[Mapping[str, Any]], *, direction: Direction, seed: int) -> None:
        self._parameters = dict(sweep.parameters)
        self._number = 0
        super().__init__(
            {_name(i): _distribution(parameter) for i, parameter in enumerate(sweep.parameters.values())},
            metric=sweep.metric,
            mode=direction,
            points_to_evaluate=[self._as_point(values) for values in begun] or None,
            # The same seed again would draw again what the trials that have begun were drawn from.
            seed=seed + len(begun),
        )

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Return the values of the next trial."""
        point = super().suggest(trial_id)
        self._number += 1
        values = {
            key: one.choice[point[_name(i)]] if one.choice is not None else rounded(one, point[_name(i)])
            for i, (key, one) in enumerate(self._parameters.items())
        }
        return {TRIAL: {"number": self._number, "values": values}}

    def _as_point(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            _name(i): list(parameter.choice).index(values[key]) if parameter.choice is not None else values[key]
            for i, (key, parameter) in enumerate(self._parameters.items())
        }


def _distribution(parameter: Parameter) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ResourceError(
            f"sweep.search: optuna needs the package optuna ({error}). Install it: {install_command('optuna')}. "
            "Or write search: random."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if parameter.choice is not None:  # Optuna takes no lists or mappings
        return optuna.distributions.CategoricalDistribution(tuple(range(len(parameter.choice))))
    if whole := parameter.int_uniform or parameter.int_log_uniform:
        return optuna.distributions.IntDistribution(*whole, log=parameter.int_log_uniform is not None)
    ends = parameter.uniform or parameter.log_uniform
    assert ends is not None  # the file was checked
    return optuna.distributions.FloatDistribution(*ends, log=parameter.log_uniform is not None)


def _name(index: int) -> str:
    """Return a parameter's name for Optuna; Ray splits keys at slashes."""
    return f"p{index}"
