"""What an experiment file could name in earlier versions and can't any more, with what to use instead."""

from collections.abc import Mapping
from typing import Any

KEYS: Mapping[str, str] = {
    "order.contiguous": (
        "Remove it. A state is no longer carried from batch to batch, so each sample starts without one. Longer "
        "samples give a recurrent model more to remember."
    ),
}
"""Remedy by dotted key."""
TARGETS: Mapping[str, str] = {
    "pipeline.data.shards": "Read the tar files with webdataset in an iterable dataset of your package (docs/data.md).",
    **dict.fromkeys(
        ("pipeline.models.LSTM", "pipeline.tasks.RecurrentLanguageModel", "pipeline.data.words"),
        "Write it in a package of your project, and name it here.",
    ),
}
"""Remedy by dotted name of a component."""
VALUES: Mapping[tuple[str, str], str] = {
    ("tracking.also", "csv"): (
        "Remove it. To write a CSV table, copy the tracker of docs/extend.md into your package and name it in "
        "tracking.trackers."
    ),
}
"""Remedy by dotted key, without indices, and value."""
ARGUMENTS: Mapping[tuple[str, str], str] = {
    ("pipeline.data.streamed", "order"): "Remove it. Rows always keep their order.",
}
"""Remedy by dotted name of a component and its argument."""


def drop_without_effect(tree: dict[str, Any]) -> None:
    """Drop what no longer exists and had no effect on the training from the experiment of a recorded run."""
    data = tree.get("data")
    if isinstance(data, dict) and (data.get("_target_"), data.get("order")) == ("pipeline.data.streamed", "kept"):
        del data["order"]
    tracking = tree.get("tracking")
    if isinstance(tracking, dict) and isinstance(tracking.get("also"), list):
        tracking["also"] = [name for name in tracking["also"] if ("tracking.also", name) not in VALUES]
