"""Ray Tune searchers for a sweep: a list of drawn values, and Optuna."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.tune.search import Searcher

from pipeline.commands.sweep.assignment import Record
from pipeline.commands.sweep.planning import rounded
from pipeline.commands.sweep.supervisor import SUGGESTION
from pipeline.config.extras import install_command
from pipeline.config.sweep import Parameter, Sweep
from pipeline.config.values import Direction
from pipeline.errors import ResourceError

Complete = Callable[[Record], tuple[Record, str]]
"""Function that adds why a suggestion can't be trained, and returns the hash of its experiment."""

_FINISHED = str(Searcher.FINISHED)


class _Forgetful(Searcher):  # type: ignore[misc]  # Ray has no types
    """Searcher without saved state: sweeps resume from journals, not from Tune's files."""

    has_ended = False
    """True if there are no more suggestions, since the cluster has no room for any trial."""

    def end(self) -> None:
        """Make no more suggestions."""
        self.has_ended = True

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing; never called."""


class Listed(_Forgetful):
    """Searcher over a list of suggestions."""

    def __init__(self, suggestions: Sequence[Record], complete: Complete, *, metric: str, mode: str) -> None:
        super().__init__(metric=metric, mode=mode)
        self._waiting = list(suggestions)
        self._complete = complete

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Return the next suggestion."""
        if self.has_ended or not self._waiting:
            return _FINISHED
        return _config(self._complete, self._waiting.pop(0))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Ignore the result."""


class Learning(_Forgetful):
    """Optuna searcher over Ray Tune's `OptunaSearch`; trials of an earlier session come first.

    Args:
        sweep: what is searched.
        begun: values of the trials that have begun, in order.
        complete: see `Complete`.
        direction: of the sweep's metric.
        seed: of the sampler.

    Raises:
        ResourceError: Optuna is not installed.
    """

    def __init__(
        self,
        sweep: Sweep,
        begun: Sequence[Mapping[str, Any]],
        complete: Complete,
        *,
        direction: Direction,
        seed: int,
    ) -> None:
        names = {"metric": sweep.metric, "mode": direction}
        super().__init__(**names)
        distributions = _distributions(sweep)
        from ray.tune.search.optuna import OptunaSearch

        self._parameters = dict(sweep.parameters)
        self._complete = complete
        self._number = 0
        self._begun = list(begun)
        self._inner = OptunaSearch(
            distributions,
            **names,
            points_to_evaluate=[self._as_point(values) for values in begun] or None,
            # The same seed again would draw again what the trials that have begun were drawn from.
            seed=seed + len(begun),
        )

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Return Optuna's suggestion after the trials so far."""
        if self.has_ended:
            return _FINISHED
        point = self._inner.suggest(trial_id)
        self._number += 1
        known = self._begun[self._number - 1] if self._number <= len(self._begun) else None
        values = known or {
            key: one.choice[point[_name(i)]] if one.choice is not None else rounded(one, point[_name(i)])
            for i, (key, one) in enumerate(self._parameters.items())
        }
        return _config(self._complete, Record(number=self._number, values=values))

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass the result on to Optuna."""
        self._inner.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Pass the result on to Optuna."""
        self._inner.on_trial_complete(trial_id, result, error)

    def _as_point(self, values: Mapping[str, Any]) -> dict[str, Any]:
        point = {}
        for i, (key, parameter) in enumerate(self._parameters.items()):
            value = values[key]
            point[_name(i)] = list(parameter.choice).index(value) if parameter.choice is not None else value
        return point


def _distributions(sweep: Sweep) -> dict[str, Any]:
    try:
        import optuna
    except ImportError as error:
        raise ResourceError(
            f"sweep.search: optuna needs the package optuna ({error}). Install it: {install_command('optuna')}. "
            "Or write search: random."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return {_name(i): _distribution(parameter) for i, parameter in enumerate(sweep.parameters.values())}


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choice is not None:
        return CategoricalDistribution(tuple(range(len(parameter.choice))))  # Optuna takes no lists or mappings
    if whole := parameter.int_uniform or parameter.int_log_uniform:
        return IntDistribution(*whole, log=parameter.int_log_uniform is not None)
    ends = parameter.uniform or parameter.log_uniform
    assert ends is not None  # the file was checked
    return FloatDistribution(*ends, log=parameter.log_uniform is not None)


def _name(index: int) -> str:
    """Return a parameter's name for Optuna; Ray splits keys at slashes."""
    return f"p{index}"


def _config(complete: Complete, suggestion: Record) -> dict[str, Any]:
    completed, config_hash = complete(suggestion)
    return {SUGGESTION: completed.model_dump_json(), "hash": config_hash}
