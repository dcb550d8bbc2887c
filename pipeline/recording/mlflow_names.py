"""Names of MLflow's runs: what ran, in words."""

import re
from collections.abc import Mapping

from pipeline.protocol.events import RunOpened, TrialOpened
from pipeline.wording import counted

_COMMANDS = {"compare": "comparison", "predict": "prediction", "tune-batch": "batch sizes"}
_TITLE = re.compile(r"\S+(?: x (?P<replicas>\d+))?(?P<remarks> \([^()]*\))?")
"""Title of a measurement: copies of the model, and in brackets the difference from others of this size."""


def name_run(event: RunOpened) -> str:
    """Name a run, e.g. "ddp, 2 workers" or "sweep"; ``tracking.run_name`` and the title of a sweep's trial come first.

    The id of the run, the name of its folder, is a tag.
    """
    role = event.tags.get("role", "main")
    if event.title or role != "main":
        return event.title or _COMMANDS.get(role, role)
    workers = _format_workers(event.tags) or event.run
    return f"quick test: {workers}" if event.tags.get("quick") == "true" else workers


def name_trial(event: TrialOpened) -> str:
    """Name a measurement by its role, e.g. "baseline: 1 worker"."""
    title = _TITLE.fullmatch(event.title)
    replicas, remarks = (title["replicas"], title["remarks"] or "") if title else (None, "")
    if not (workers := _format_workers(event.tags, replicas=replicas)):
        return event.title
    match event.role:
        case "baseline":
            return f"baseline: {workers.removeprefix('single, ')}"
        case "reference":
            return f"reference: 1 process, {counted(int(event.tags.get('cpus_per_worker', 1)), 'core')}"
        case "cell":
            return f"{workers}{remarks}"
    return event.title


def _format_workers(tags: Mapping[str, str], *, replicas: str | None = None) -> str:
    """Return strategy and number of workers, of DataParallel's GPUs if known; empty in journals that lack them."""
    if "strategy" not in tags or "world_size" not in tags:
        return ""
    if replicas and tags["world_size"] == "1":
        return f"{tags['strategy']}, {replicas} GPUs"
    return f"{tags['strategy']}, {counted(int(tags['world_size']), 'worker')}"
