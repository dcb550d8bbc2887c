"""The values of a sweep, each looked at as if the file had it: a wrong one is refused before anything is trained."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config import keys
from pipeline.config.dialect import Dumper
from pipeline.config.schema import Experiment
from pipeline.errors import ExperimentError, Problem

if TYPE_CHECKING:
    from pipeline.config.load import ExperimentFile

_FIXED = ("name", "tracking", "sweep", "compare", "measure", "parallel", "checkpoint")
"""What doesn't decide how well a model is trained, or what all trials share."""
_ALLOWED = "parallel.options"  # local_sgd_period and communication_hook do

Vary = Callable[[Mapping[str, Any]], "ExperimentFile"]
Check = Callable[["ExperimentFile"], object]


def override(key: str, value: object) -> str:
    """As the command line has it, e.g. "optimizer.lr=0.1"."""
    return f"{key}={written(value)}"


def written(value: object) -> str:
    """A value as YAML in one line."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)  # 1e-06, which PyYAML spells 1.0e-06
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def problems(experiment: Experiment, vary: Vary) -> list[Problem]:
    """What is wrong with the keys and values of the experiment's sweep, one value at a time; all of it.

    Args:
        experiment: valid by itself.
        vary: the file with other values.
    """
    if experiment.sweep is None:
        return []
    found: list[Problem] = []
    for key, parameter in experiment.sweep.parameters.items():
        wrong = list(_key_problems(key, among=list(experiment.sweep.parameters)))
        wrong = wrong or _all_refusals(key, parameter.candidates, vary, lambda _: None)
        found += [Problem(f"sweep.parameters.{key}", message) for message in wrong]
    return found


def check_each(experiment: Experiment, vary: Vary, check: Check) -> list[Problem]:
    """What ``check`` has against the values of the sweep, one value at a time."""
    if experiment.sweep is None:
        return []
    found: list[Problem] = []
    for key, parameter in experiment.sweep.parameters.items():
        wrong = _all_refusals(key, parameter.candidates, vary, check)
        found += [Problem(f"sweep.parameters.{key}", message) for message in wrong]
    return found


def _key_problems(key: str, *, among: list[str]) -> Iterator[str]:
    try:
        section = str(keys.split(key)[0])
    except ValueError:
        yield f"{key!r} is no key of an experiment; write a dotted one, such as optimizer.lr"
        return
    if section in _FIXED and not f"{key}.".startswith(f"{_ALLOWED}."):
        yield f"{section} is the same for all trials of a sweep; to compare strategies or workers, use pipeline compare"
    around = set(keys.ancestors(key)) - {key}
    if inside := next((other for other in among if other in around), None):
        yield f"lies inside {inside}, which is varied as a whole; remove one of them"


def _all_refusals(key: str, values: tuple[Any, ...], vary: Vary, check: Check) -> list[str]:
    return list(dict.fromkeys(message for value in values for message in _refusals(key, value, vary, check)))


def _refusals(key: str, value: object, vary: Vary, check: Check) -> Iterator[str]:
    """Why the file can't have that value."""
    try:
        check(vary({key: value}))
    except ExperimentError as error:
        for problem in error.problems:
            yield problem.message if problem.key == key else f"with {written(value)}: {problem.key}: {problem.message}"
