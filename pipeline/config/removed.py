"""What an experiment file could name in earlier versions and can't any more, with what to use instead."""

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    "order.contiguous": (
        "Remove it. A state is no longer carried from batch to batch, so each sample starts without one. Longer "
        "samples give a recurrent model more to remember."
    ),
}
"""Remedy by dotted key."""
TARGETS: Mapping[str, str] = dict.fromkeys(
    ("pipeline.models.LSTM", "pipeline.tasks.RecurrentLanguageModel", "pipeline.data.words"),
    "Write it in a package of your project, and name it here.",
)
"""Remedy by dotted name of a component."""
