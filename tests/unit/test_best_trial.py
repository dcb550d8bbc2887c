"""Which trial of a sweep is the best: of those that were trained to their end, by the direction of its metric."""

import json
import math
from typing import Any

import pytest

from pipeline.commands.study_trials.journals import Evaluation, best_of
from pipeline.commands.study_trials.sweep_report import _is_logarithmic
from pipeline.experiment.sweep import Parameter
from pipeline.report.swept import Swept, SweptReport, SweptTrial


def trials(*values: float | None, **of_one: Any) -> list[SweptTrial]:
    """Finished ones with these values; ``of_one`` changes the second."""
    made = [
        SweptTrial(number=n, values={}, state="finished", value=value, run=f"sweep/trial-{n:03}")
        for n, value in enumerate(values, start=1)
    ]
    return [one.model_copy(update=of_one) if one.number == 2 else one for one in made]


@pytest.mark.parametrize(
    ("given", "smallest", "largest"),
    [
        (trials(0.3, 0.1, 0.2), 2, 1),
        (trials(0.3, 0.1, 0.2, state="stopped early"), 3, 1),
        (trials(0.3, 0.9, 0.2, state="failed"), 3, 1),
        (trials(0.3, math.nan, 0.2), 3, 1),
        (trials(None, 0.1, None), 2, 2),
        (trials(0.2, 0.2), 1, 1),
    ],
)
def test_the_best_has_the_smallest_or_the_largest_value(given: list[SweptTrial], smallest: int, largest: int) -> None:
    least, most = best_of(given, "min"), best_of(given, "max")
    assert least is not None
    assert most is not None
    assert (least.number, most.number) == (smallest, largest)


def test_there_is_none_where_none_was_measured() -> None:
    assert best_of(trials(None, math.nan), "min") is None


def test_a_sweep_whose_metric_is_nan_says_so_and_is_valid_json() -> None:
    swept = Swept(
        experiment="tiny", metric="validation/pearson", mode="max", search="random", seed=0, best=None, command=(),
        run="made", trials=tuple(trials(math.nan, math.nan)),
    )  # fmt: skip
    assert swept.describe_missing_best() == (
        "validation/pearson is NaN in all completed trials, so there is no best trial"
    )
    for record in (swept, SweptReport(swept=swept, hardware="")):
        json.loads(record.model_dump_json(), parse_constant=pytest.fail)
    assert Evaluation(1, 1, math.nan).as_score(minimizes=False) == -math.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"log_uniform": [0.001, 0.01]}, True),
        ({"uniform": [0.0, 0.95]}, False),
        ({"grid": [0.001, 0.01, 0.1]}, True),
        ({"choice": [32, 64, 128]}, False),
        ({"choice": [1, "auto", 1000]}, False),
        ({"choice": [[32], [64, 64]]}, False),
    ],
)
def test_values_over_orders_of_magnitude_have_a_logarithmic_axis(values: dict[str, Any], expected: bool) -> None:
    assert _is_logarithmic(Parameter.model_validate(values)) == expected
