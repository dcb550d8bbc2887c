"""Names of MLflow's runs: what ran, in words."""

from pipeline.protocol.events import RunOpened, TrialOpened
from pipeline.wording import format_parallel

_EARLIER = {"compare": "benchmark", "predict": "prediction", "tune-batch": "batch sizes"}
"""Names of the runs of earlier commands."""


def name_run(event: RunOpened) -> str:
    """Name a run, e.g. "ddp, 2 workers" or "sweep"; ``tracking.run_name`` and the title of a sweep's trial come first.

    The id of the run, the name of its folder, is a tag.
    """
    role = event.tags.get("role", "main")
    if event.title or role != "main":
        return event.title or _EARLIER.get(role, role)
    if "strategy" not in event.tags or "world_size" not in event.tags:  # a journal of an earlier version
        return event.run
    workers = format_parallel(event.tags["strategy"], int(event.tags["world_size"]))
    return f"quick test: {workers}" if event.tags.get("quick") == "true" else workers


def name_trial(event: TrialOpened) -> str:
    """Name a measurement by its role, e.g. "baseline: 1 worker"."""
    return f"{event.role}: {event.title}" if event.role in {"baseline", "reference"} else event.title
