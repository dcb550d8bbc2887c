"""Values of each trial of a sweep: a pure function of the sweep's seed, the number of the draw, and the key."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.overrides import override
from pipeline.config.sweep import Parameter, Sweep

_DIGITS = 4


def draws(sweep: Sweep, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the values of all trials: for each draw, all combinations of the grids, the last grid varying fastest.

    A larger ``sweep.trials`` appends trials without changing earlier ones.
    """
    grids = sweep.grids
    for draw in range(sweep.trials):
        drawn = {key: _drawn(one, f"{seed}/{draw}/{key}") for key, one in sweep.parameters.items() if key not in grids}
        for combination in itertools.product(*grids.values()):
            values = {**drawn, **dict(zip(grids, combination, strict=True))}
            yield {key: values[key] for key in sweep.parameters}


def rounded(parameter: Parameter, value: Any) -> Any:
    """Round a fractional number to four significant digits, within its range."""
    ends = parameter.uniform or parameter.log_uniform
    if ends is None:
        return value
    return min(max(float(f"{value:.{_DIGITS}g}"), ends[0]), ends[1])


def titled(number: int, values: Mapping[str, Any]) -> str:
    """Return the title of a trial, e.g. "trial 3: optimizer.lr=0.01, model.width=64"."""
    return f"trial {number}: {', '.join(override(key, value) for key, value in values.items())}"


def _drawn(parameter: Parameter, key: str) -> Any:
    source = random.Random(key)  # noqa: S311 - nothing secret; seeded with a text, it is the same everywhere
    if parameter.choice is not None:
        return source.choice(parameter.choice)
    if parameter.int_uniform is not None:
        return source.randint(*parameter.int_uniform)
    if parameter.int_log_uniform is not None:
        low, high = parameter.int_log_uniform
        return min(int(_log_uniform(source, low, high + 1)), high)
    if parameter.log_uniform is not None:
        return rounded(parameter, _log_uniform(source, *parameter.log_uniform))
    assert parameter.uniform is not None  # the file was checked
    return rounded(parameter, source.uniform(*parameter.uniform))


def _log_uniform(source: random.Random, low: float, high: float) -> float:
    return math.exp(source.uniform(math.log(low), math.log(high)))
