"""The table of runs as our links open it: a view that MLflow's UI keeps with the experiment.

By default that table shows where runs come from, not what they reached. The UI takes the columns of a saved view from
a tag of the experiment and applies it where a link names it; nobody's own settings are changed.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.recording.store import VIEW

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = f"mlflow.sharedViewState.{VIEW}"
"""Of an experiment that has the view."""

_ALWAYS = {"0": 50, "attributes.`Run Name`": 275, "runDateAndNestInfo": 145}
"""Columns that can't be taken away, as the table calls them; the widths are in pixels."""
_TAGS = {"strategy": 75, "world_size": 85, "launcher": 75}
_METRICS = {"speedup": 75, "efficiency": 80, "samples_per_second": 150}
_LOSSES = {"validation/loss": 100, "train/loss": 80}
_METRIC_KEY = "metrics."  # of the experiment's metrics, among the flattened parameters
_MOST_METRICS = 8  # more can't be read without scrolling


def save(client: "MlflowClient", experiment_id: str, *, params: Mapping[str, str], created_ms: int) -> None:
    """Save the view with an experiment; the same again changes nothing.

    Args:
        client: of the store.
        experiment_id: MLflow's id.
        params: of a run, flattened; the metrics that it names have columns.
        created_ms: when that run began, in milliseconds since the epoch.

    Raises:
        Exception: whatever MLflow raises.
    """
    widths = columns(params)
    chosen = [name for name in widths if name not in _ALWAYS]
    state = {
        # The same column has one name among those that are chosen and another one in the table.
        "selectedColumns": ["attributes.`Duration`" if name == "duration" else name for name in chosen],
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    view = {"name": "Speedups", "createdAt": created_ms, "state": json.dumps(state)}
    client.set_experiment_tag(experiment_id, TAG, json.dumps(view))


def columns(params: Mapping[str, str]) -> dict[str, int]:
    """The columns as the table calls them, from left to right, with their widths; those that no run has don't show."""
    named = (name.removeprefix(_METRIC_KEY).partition(".")[0] for name in params if name.startswith(_METRIC_KEY))
    validation = {f"validation/{name}": 130 for name in list(dict.fromkeys(named))[:_MOST_METRICS]}
    tags = {f"tags.`{name}`": width for name, width in _TAGS.items()}
    metrics = {f"metrics.`{name}`": width for name, width in {**_METRICS, **validation, **_LOSSES}.items()}
    return {**_ALWAYS, **tags, **metrics, "duration": 80}
