"""Saved view of MLflow's table of runs, which the printed links open.

By default the table shows the source of runs, not their results. MLflow's UI reads the columns of a saved view from a
tag of the experiment and applies them where a link names the view; a user's own settings don't change.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.recording.store import VIEW

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = f"mlflow.sharedViewState.{VIEW}"
"""Tag of an experiment that has the view."""

_ALWAYS = {"0": 50, "attributes.`Run Name`": 275, "runDateAndNestInfo": 145}
"""Widths in pixels of the columns that can't be hidden."""
_TAGS = {"strategy": 75, "world_size": 85, "launcher": 75}
_METRICS = {"speedup": 75, "efficiency": 80, "samples_per_second": 150}
_LOSSES = {"validation/loss": 100, "train/loss": 80}
_METRIC_KEY = "metrics."  # prefix of the experiment's metrics among its flattened parameters
_MOST_METRICS = 8  # more need scrolling


def save(client: "MlflowClient", experiment_id: str, *, params: Mapping[str, str], created_ms: int) -> None:
    """Save the view with an experiment; idempotent.

    Args:
        client: client of the store.
        experiment_id: MLflow's id of the experiment.
        params: flattened parameters of a run; its metrics get columns.
        created_ms: start of the run, in milliseconds since the epoch.

    Raises:
        Exception: whatever MLflow raises.
    """
    widths = columns(params)
    chosen = [name for name in widths if name not in _ALWAYS]
    state = {
        # The column is named differently in the two lists.
        "selectedColumns": ["attributes.`Duration`" if name == "duration" else name for name in chosen],
        "columnOrder": list(widths),
        "columnWidths": widths,
    }
    view = {"name": "Speedups", "createdAt": created_ms, "state": json.dumps(state)}
    client.set_experiment_tag(experiment_id, TAG, json.dumps(view))


def columns(params: Mapping[str, str]) -> dict[str, int]:
    """Return the widths of the columns, from left to right; MLflow hides columns without values."""
    named = (name.removeprefix(_METRIC_KEY).partition(".")[0] for name in params if name.startswith(_METRIC_KEY))
    validation = {f"validation/{name}": 130 for name in list(dict.fromkeys(named))[:_MOST_METRICS]}
    tags = {f"tags.`{name}`": width for name, width in _TAGS.items()}
    metrics = {f"metrics.`{name}`": width for name, width in {**_METRICS, **validation, **_LOSSES}.items()}
    return {**_ALWAYS, **tags, **metrics, "duration": 80}
