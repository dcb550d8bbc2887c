"""Keys, values and components of an experiment file that earlier versions had, and what to use instead."""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "pipeline.data.shards": "Read the tar files with webdataset in an iterable dataset of your package (docs/data.md).",
}
"""What to use instead, by the dotted name of a component."""


def describe_removed(name: str) -> str | None:
    """Return the message about something that was removed; None for anything else."""
    return f"{name} was removed. {REMOVED[name]}" if name in REMOVED else None
