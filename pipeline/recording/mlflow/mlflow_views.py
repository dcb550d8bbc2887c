"""Saved views of MLflow's table of runs: the runs of an experiment, and the trials of each sweep.

By default MLflow's table shows the source of runs, not their results. Its UI reads a view's columns, order, filter and
charts from a tag of the experiment and applies them where a link names the view; a user's own settings don't change.
docs/decisions/0020-mlflow-pages.md says what a view can't do.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.reported import mlflow_name
from pipeline.config.sweep import Parameter
from pipeline.config.values import Direction
from pipeline.recording.mlflow.store import VIEW, sweep_view

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "mlflow.sharedViewState."
VIEW_TAG = f"{_TAG}{VIEW}"
"""Tag of an experiment that has the view of its runs."""
_ALWAYS = {"0": 50, "attributes.`Run Name`": 310, "runDateAndNestInfo": 145}
"""Widths in pixels of the columns that can't be hidden."""
_TAGS = {"strategy": 75, "launcher": 90, "world_size": 85, "speedup": 215}
_METRIC_WIDTH, _PARAM_WIDTH, _DURATION_WIDTH = 150, 150, 80  # MLflow shows all digits of a metric
_LOSSES = ("validation/loss", "train/loss")
_METRIC_KEY = "metrics."  # prefix of the experiment's metrics among its flattened parameters
_PARAMETER = re.compile(rf"sweep\.parameters\.(.+)\.(?:{'|'.join(Parameter.model_fields)})(?:\[.*)?")
_MOST_METRICS = 8  # more need scrolling
_MOST_PARAMETERS = 6
_SECTIONS = ("train", "validation", "", "workers/throughput", "workers/time", "workers/badput", "workers/memory")
"""Prefixes of metrics, in the order of the sections of charts; without one MLflow calls them Model metrics."""
_UNPREFIXED, _SYSTEM, _SWEEP = "Model metrics", "System metrics", "sweep"


def save_runs_view(client: "MlflowClient", experiment_id: str, *, params: Mapping[str, str], created_ms: int) -> None:
    """Save the view of an experiment's runs; idempotent.

    Args:
        client: client of the store.
        experiment_id: MLflow's id of the experiment.
        params: flattened parameters of a run; its metrics get columns.
        created_ms: start of the run, in milliseconds since the epoch.

    Raises:
        Exception: whatever MLflow raises.
    """
    state = _columns_state(columns(params)) | _charts_state(_SECTIONS)
    _save(client, experiment_id, key=VIEW, name="Speedups", state=state, created_ms=created_ms)


def save_trials_view(
    client: "MlflowClient",
    experiment_id: str,
    *,
    sweep: str,
    params: Mapping[str, str],
    directions: Mapping[str, Direction],
    created_ms: int,
) -> None:
    """Save the view of a sweep's trials, a row each without their sweep's, with its parameters; see `save_runs_view`.

    Args:
        client: client of the store.
        experiment_id: MLflow's id of the experiment.
        sweep: id of the sweep.
        params: flattened parameters of the sweep.
        directions: directions in which its metrics are better, by reported name; empty in journals of before.
        created_ms: start of the sweep, in milliseconds since the epoch.
    """
    metric = mlflow_name(params.get("sweep.metric", "validation/loss"))
    varied = list(varied_params(params))
    first = {f"params.`{name}`": _PARAM_WIDTH for name in varied} | {f"metrics.`{metric}`": _METRIC_WIDTH}
    metrics = {f"metrics.`{name}`": _METRIC_WIDTH for name in _metric_names(params)}
    widths = {**_ALWAYS, **first, **metrics, "tags.`stopped_early`": 240, "duration": _DURATION_WIDTH}
    parallel = {
        "type": "PARALLEL", "uuid": "parallel", "metricSectionId": _SWEEP, "isGenerated": False, "deleted": False,
        "runsCountToCompare": 100, "selectedParams": varied, "selectedMetrics": [metric], "showAllRuns": True,
    }  # fmt: skip
    section = metric.rpartition("/")[0]
    others = [name for name in _SECTIONS if name != section]
    state = (
        _columns_state(widths)
        | _charts_state((_SWEEP, section, *others), charts=[parallel])
        | {"searchFilter": f"tags.sweep = '{sweep}'", "runsHiddenMode": "FIRST_20_RUNS"}
    )
    if (order := directions.get(params.get("sweep.metric", "")) or _order(params)) is not None:
        state |= {"orderByKey": f"metrics.`{metric}`", "orderByAsc": order == "min"}
    _save(client, experiment_id, key=sweep_view(sweep), name=f"Trials of {sweep}", state=state, created_ms=created_ms)


def columns(params: Mapping[str, str]) -> dict[str, int]:
    """Return the widths of the columns of runs, from left to right; MLflow hides columns without values."""
    tags = {f"tags.`{name}`": width for name, width in _TAGS.items()}
    names = [*_metric_names(params), "samples_per_second"]
    metrics = {f"metrics.`{name}`": _METRIC_WIDTH for name in names}
    return {**_ALWAYS, **tags, **metrics, "duration": _DURATION_WIDTH}


def shared_params(params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a run; of a sweep those that all trials share, as no trial has the file's own values.

    Args:
        params: flattened parameters of the run.
    """
    varied = {found[1] for name in params if (found := _PARAMETER.fullmatch(name))}
    return {name: value for name, value in params.items() if not any(_is_part(name, of=key) for key in varied)}


def _is_part(name: str, *, of: str) -> bool:
    return name == of or name.startswith((f"{of}.", f"{of}["))


def varied_params(params: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameters that a sweep varies, as MLflow names them in the runs of its trials.

    Args:
        params: flattened parameters of the sweep.
    """
    keys = dict.fromkeys(found[1] for name in params if (found := _PARAMETER.fullmatch(name)))
    for key in list(keys)[:_MOST_PARAMETERS]:
        is_component = any(name.startswith(f"sweep.parameters.{key}.") and "._target_" in name for name in params)
        yield mlflow_name(f"{key}._target_" if is_component else key)


def _metric_names(params: Mapping[str, str]) -> list[str]:
    named = (name.removeprefix(_METRIC_KEY).partition(".")[0] for name in params if name.startswith(_METRIC_KEY))
    validated = [f"validation/{name}" for name in list(dict.fromkeys(named))[:_MOST_METRICS]]
    return list(dict.fromkeys([*validated, *_LOSSES]))


def _order(params: Mapping[str, str]) -> str | None:
    """Return the direction in which a sweep's metric improves; None if only the driver knows it."""
    if (mode := params.get("sweep.mode")) in ("min", "max"):
        return mode
    return "min" if params.get("sweep.metric") == "validation/loss" else None


def _columns_state(widths: Mapping[str, int]) -> dict[str, Any]:
    chosen = [name for name in widths if name not in _ALWAYS]
    return {
        # The column is named differently in the two lists.
        "selectedColumns": ["attributes.`Duration`" if name == "duration" else name for name in chosen],
        "columnOrder": list(widths),
        "columnWidths": dict(widths),
    }


def _charts_state(sections: Sequence[str], *, charts: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the order of the sections of charts; MLflow adds a chart for each metric to the section of its prefix."""
    names = dict.fromkeys([*(name or _UNPREFIXED for name in sections), _SYSTEM])
    return {
        "isAccordionReordered": True,  # else MLflow sorts the sections by name
        "compareRunCharts": list(charts),
        "compareRunSections": [
            {
                "uuid": name,
                "name": name,
                "display": name != _SYSTEM,
                "isReordered": False,
                "columns": 1 if name == _SWEEP else 3,  # in a third of the width the names of the axes overlap
            }
            for name in names
        ],
    }


def _save(
    client: "MlflowClient", experiment_id: str, *, key: str, name: str, state: Mapping[str, Any], created_ms: int
) -> None:
    view = {"name": name, "createdAt": created_ms, "state": json.dumps(state)}
    client.set_experiment_tag(experiment_id, f"{_TAG}{key}", json.dumps(view))
