"""The section ``sweep`` of an experiment: parameters, metric and early stopping, and the check of all their values."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from pipeline.errors import ExperimentError, Problem
from pipeline.experiment import keys
from pipeline.experiment.values import Mode, NotNegative, OrSwitch, Positive, Section
from pipeline.experiment.yaml_text import format_value

Varied = TypeVar("Varied")
"""Type of an experiment with other values."""

_MOST_TRIALS = 10_000
_FIXED = ("name", "tracking", "sweep", "benchmark", "parallel", "checkpoint")
"""Sections that don't change how well a model is trained, or that all trials share."""
_ALLOWED = "parallel.options"  # communication_hook changes the training


def _range(kind: type, *, example: str, least: float = -math.inf) -> BeforeValidator:
    """Return a validator of two finite numbers in ascending order, above ``least``."""
    noun, allowed = ("numbers", (int, float)) if kind is float else ("integers", (int,))

    def check(value: object) -> object:
        where = f", e.g. {example}"
        if isinstance(value, list | tuple):
            where += f", instead of {json.dumps(value, default=str)}"
        if not isinstance(value, list | tuple) or len(value) != 2 or any(type(end) not in allowed for end in value):
            raise ValueError(f"write two {noun}, the lowest and the highest{where}")
        if not all(map(math.isfinite, value)):
            raise ValueError(f"write two finite {noun}{where}")
        if value[0] >= value[1]:
            raise ValueError(f"write the lowest first, then one that is higher{where}")
        if value[0] <= least:
            raise ValueError(f"a logarithm needs {noun} greater than 0{where}")
        return value

    return BeforeValidator(check)


def _pair(of: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": {"type": of}, "minItems": 2, "maxItems": 2})


Uniform = Annotated[tuple[float, float], _range(float, example="[0.0, 0.5]"), _pair("number")]
LogUniform = Annotated[tuple[float, float], _range(float, example="[1e-4, 1e-1]", least=0), _pair("number")]
IntUniform = Annotated[tuple[int, int], _range(int, example="[2, 8]"), _pair("integer")]
IntLogUniform = Annotated[tuple[int, int], _range(int, example="[16, 512]", least=0), _pair("integer")]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class Parameter(Section):
    """Values of one swept key: exactly one of these."""

    grid: Values | None = None
    """Use every value, combined with every value of the other grids."""
    choice: Values | None = None
    """Random value of this list, all equally likely."""
    uniform: Uniform | None = None
    """Random number in [low, high]."""
    log_uniform: LogUniform | None = None
    """Random number in [low, high] with a uniform logarithm, e.g. for learning rates."""
    int_uniform: IntUniform | None = None
    """Random integer in [low, high], both included."""
    int_log_uniform: IntLogUniform | None = None
    """Random integer in [low, high] with a uniform logarithm, e.g. for sizes."""

    @model_serializer(mode="wrap")
    def _only_what_is_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of values that are given; exactly one in a valid file."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def candidates(self) -> tuple[Any, ...]:
        """All values of a list, or the ends of a range."""
        return tuple(value for kind in self.kinds for value in getattr(self, kind))

    def __str__(self) -> str:
        kind = self.kinds[0]
        return f"{kind} {json.dumps(list(getattr(self, kind)))}"


class Asha(Section):
    """Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning")."""

    grace_epochs: Positive = 1
    """Epochs that each trial trains before it may be stopped early."""
    reduction_factor: Annotated[int, Field(ge=2, strict=True)] = 3
    """Trials are compared at epoch grace_epochs, and at its multiples by powers of this number; one in this many
    continues."""


class Sweep(Section):
    """Parameters that ``pipeline sweep`` varies, and the metric that ranks the trials."""

    metric: Annotated[str, Field(pattern=r"^validation/.")] = "validation/loss"
    """The metric that ranks the trials, such as validation/loss. The last value counts."""
    mode: Mode = "auto"
    """Direction of ``metric``: min if small values are good, max if large ones are; auto: by torchmetrics'
    higher_is_better, and min for validation/loss. auto is an error for metrics that don't have it."""
    parameters: Annotated[Mapping[str, Parameter], Field(min_length=1)]
    """Values by dotted key, written as in overrides: optimizer.lr: {log_uniform: [1e-4, 1e-1]}."""
    trials: Positive = 1
    """Number of random draws of the parameters that are not grids. Each draw is trained once per grid combination."""
    search: Literal["random", "optuna"] = "random"
    """random draws trials independently; optuna (TPE) learns from the trials that have ended."""
    asha: OrSwitch[Asha] = None
    """Early stopping of trials that are worse than other trials at the same epoch: true for the defaults, or a
    section."""
    concurrent: Positive | None = None
    """Number of trials that run at the same time. Default: as many as cores or GPUs allow."""
    seed: NotNegative | None = None
    """Seed of the random draws; default: the seed of the experiment."""

    @property
    def grids(self) -> dict[str, tuple[Any, ...]]:
        """Values of the grid parameters, by key."""
        return {key: found.grid for key, found in self.parameters.items() if found.grid is not None}

    @property
    def combinations(self) -> int:
        """Number of combinations of the grids; 1 without grids."""
        return math.prod(len(values) for values in self.grids.values())

    @property
    def total(self) -> int:
        """Total number of trials."""
        return self.trials * self.combinations


def find_misuse(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Find contradictions between keys of the section; yield each key inside it with a message."""
    wrong = {key: one for key, one in sweep.parameters.items() if len(one.kinds) != 1}
    for key, parameter in wrong.items():
        given = f"combines {' and '.join(parameter.kinds)}" if parameter.kinds else "has no values"
        names = ", ".join(Parameter.model_fields)
        yield f"parameters.{key}", f"{given}. Set one of {names}, e.g. {{choice: [1, 2]}}"
    for key in sweep.grids if sweep.search == "optuna" else ():
        if key not in wrong:
            yield f"parameters.{key}.grid", "optuna cannot search a grid. Set choice, or search: random."
    drawn = [key for key in sweep.parameters if key not in sweep.grids]
    if wrong:
        return
    if sweep.trials == 1 and drawn and "trials" not in sweep.model_fields_set:
        yield "trials", f"missing. Set the number of random draws of {', '.join(drawn)}."
    if not drawn and sweep.trials > 1:
        yield "trials", f"is {sweep.trials}, but all parameters are grids, without random draws. Remove this key."
    if sweep.total > _MOST_TRIALS:  # taken for typing errors
        most = f"at most {_MOST_TRIALS:,} trials"
        yield "parameters", f"result in {sweep.total:,} trials. Use fewer values or draws: {most}."


def find_problems(
    sweep: Sweep | None,
    vary: Callable[[Mapping[str, Any]], Varied],
    check: Callable[[Varied], object] = lambda _: None,
) -> list[Problem]:
    """Find the parameters that can't be varied, and values that ``vary`` or ``check`` refuses, tried one at a time."""
    found: dict[Problem, None] = {}
    for key, parameter in sweep.parameters.items() if sweep is not None else ():
        where = f"sweep.parameters.{key}"
        assert sweep is not None
        if wrong := list(_find_wrong_key(key, among=sweep.parameters)):
            found |= dict.fromkeys(Problem(where, message) for message in wrong)
            continue
        for value in parameter.candidates:
            try:
                check(vary({key: value}))
            except ExperimentError as error:
                for one in error.problems:
                    said = one.message if one.key == key else f"with {format_value(value)}: {one.key}: {one.message}"
                    found[Problem(where, said)] = None
    return list(found)


def _find_wrong_key(key: str, *, among: Mapping[str, Parameter]) -> Iterator[str]:
    try:
        section = str(keys.split(key)[0])
    except ValueError:
        yield f"{key!r} is not a key of an experiment. Use a dotted key such as optimizer.lr."
        return
    if section in _FIXED and not f"{key}.".startswith(f"{_ALLOWED}."):
        yield f"{section} is fixed for all trials of a sweep. To compare strategies or workers, use pipeline benchmark."
    around = set(keys.ancestors(key)) - {key}
    if inside := next((other for other in among if other in around), None):
        yield f"is inside {inside}, which is also varied. Remove one of them."
