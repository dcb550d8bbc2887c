"""Summary of a run by its journal: what it was, what became of it, and its most important figures."""

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Literal

from pydantic import ConfigDict

from pipeline.experiment.reported import PREFIX
from pipeline.experiment.values import Frozen
from pipeline.protocol.estimates import Estimate
from pipeline.protocol.events import Finished, Metrics, RunOpened, Started, Tagged
from pipeline.protocol.labels import Status
from pipeline.record import journal
from pipeline.record.folder import ENVIRONMENT_NAME, id_of, is_quick, sweep_of
from pipeline.record.trial_progress import LOSS
from pipeline.wording import format_parallel

_METRIC = ("metrics.", "._target_")
"""Beginning and end of the parameters that name the experiment's metrics."""
_ENVIRONMENT = ("git_commit", "git_dirty", "hardware", "user", "python")
"""Tags of a run about its code and its machine."""
_COMMENT = "# "
_BEST = "best."
"""Beginning of the tags of a sweep that hold values of its best trial."""


class RunSummary(Frozen):
    """Summary of one run, a line of ``pipeline list``."""

    model_config = ConfigDict(ser_json_inf_nan="null")  # a loss that diverged

    run: str
    """Id of the run: the name of its folder, after the sweep's if it is a trial."""
    folder: Path
    command: str
    """run, benchmark, compare, sweep or evaluate."""
    experiment: str
    status: Status | Literal["RUNNING", "STOPPED"]
    """RUNNING while a driver writes to the journal; KILLED if it died without closing it; STOPPED: a trial, by ASHA."""
    strategy: str | None
    """Strategy of a training; None for other commands."""
    workers: int | None
    """Planned number of processes (world size) of a training."""
    speedup: float | None
    """Speedup, in a benchmark that of the configuration with most workers; None if none was measured."""
    efficiency: float | None
    speedup_ci_low: float | None = None
    speedup_ci_high: float | None = None
    """Ends of the interval of the speedup."""
    speedup_rounds: int = 0
    """Rounds of measurements behind the interval."""
    samples_per_second: float | None = None
    """Throughput of a training, or of the row that a benchmark's speedup is about."""
    metric: str = ""
    """Name of the metric that tells best what was learned; empty if there is none."""
    metrics: Mapping[str, float] = {}
    """Last values of the training's validation metrics, or its last loss without them; the best value of a sweep."""
    is_quick: bool = False
    """True for ``run --quick``: its metrics and its throughput are those of two steps, so they are left out."""
    verdict: str = ""
    """Result in one line, the first of the run's summary; empty without one."""
    began: datetime
    ended: datetime | None
    """End of the run; None while it is running, or if its driver was killed."""
    seconds: float | None = None
    """Time from beginning to end, interruptions included; None without an end."""
    message: str = ""
    """Why the run ended, unless it finished."""
    sweep: str = ""
    """Id of the sweep; empty unless the run is a trial."""

    @property
    def ratio(self) -> Estimate | None:
        """Speedup with its interval; None without an interval."""
        if self.speedup is None or self.speedup_ci_low is None or self.speedup_ci_high is None:
            return None
        return Estimate(self.speedup, self.speedup_ci_low, self.speedup_ci_high, self.speedup_rounds)

    @property
    def what(self) -> str:
        """Kind of the run, e.g. "ddp, 2 workers" or "benchmark"."""
        kind = self.command if self.strategy is None else format_parallel(self.strategy, self.workers or 1)
        return f"quick test: {kind}" if self.is_quick else kind


def summarized(folder: Path) -> RunSummary | None:
    """Summarize one run; None if it never started."""
    path = folder / journal.FILE_NAME
    if (begun := next((e for e in journal.marked(path, "run_opened") if isinstance(e, RunOpened)), None)) is None:
        return None
    start, stop = _METRIC
    validated = [key[len(start) : -len(stop)] for key in begun.params if key.startswith(start) and key.endswith(stop)]
    names = [f"{PREFIX}{name}" for name in ("loss", *validated)]
    opened, figures, best, trained = list[RunOpened](), dict[str, float](), dict[str, float](), None
    for event in journal.marked(path, "run_opened", "finished", "tagged", "speedup", "samples_per_second", *names):
        match event:
            case RunOpened():
                opened.append(event)
            case Finished() if event.trial == "main":
                trained = event.result
            case Metrics() if event.trial == "main":
                figures |= {point.name: point.value for point in event.points}
            case Tagged():  # of a sweep: values of its best trial
                tags = {name.removeprefix(_BEST): text for name, text in event.tags.items() if name.startswith(_BEST)}
                with suppress(ValueError):
                    best |= {name: float(text) for name, text in tags.items() if name.startswith(PREFIX)}
    is_open, end = journal.is_open(path), journal.ending(path)
    first, last = opened[0], opened[-1]
    role, workers, quick = last.tags.get("role", "main"), last.tags.get("world_size"), is_quick(last)
    is_training = role == "main"
    known = {**figures, **(trained.metrics if trained else {}), **best}
    metrics = {name: value for name, value in known.items() if name.startswith(PREFIX)}
    metrics = metrics or {name: value for name, value in known.items() if name == LOSS and trained}
    throughput = figures.get("samples_per_second")
    if trained:  # as the report shows it: of slots, if there were any
        slots = trained.slots
        throughput = geometric_mean(slots) if slots and min(slots) > 0 else trained.samples_per_second.median
    main = last.params.get("checkpoint.best", "")
    if quick:
        metrics, throughput = {}, None
    if main not in metrics:  # else one that is no loss, or else the loss
        main = min(metrics, key=lambda name: name.endswith("/loss"), default="")
    began = datetime.fromtimestamp(first.time, UTC)
    ended = datetime.fromtimestamp(end.time, UTC) if end and not is_open else None
    status = "KILLED" if end is None else "STOPPED" if end.is_stopped_early else end.status
    return RunSummary(
        run=id_of(folder),
        sweep=sweep_of(folder),
        folder=folder,
        command="run" if is_training else role,
        experiment=last.params.get("name", last.tracking_experiment),
        status="RUNNING" if is_open else status,
        strategy=last.tags.get("strategy") if is_training else None,
        workers=int(workers) if is_training and workers else None,
        speedup=figures.get("speedup"),
        efficiency=figures.get("efficiency"),
        speedup_ci_low=figures.get("speedup_ci_low"),
        speedup_ci_high=figures.get("speedup_ci_high"),
        speedup_rounds=int(pairs) if math.isfinite(pairs := figures.get("speedup_rounds", 0)) else 0,
        samples_per_second=throughput,
        metric=main,
        metrics=metrics,
        is_quick=quick,
        verdict=end.summary.partition("\n")[0].strip("*") if end and not is_open else "",
        began=began,
        ended=ended,
        seconds=(ended - began).total_seconds() if ended else None,
        message=end.message if end and not is_open else "",
    )


def data_of(folder: Path) -> dict[str, str]:
    """Return what is recorded of a training's data: its digest, and its version if it has one."""
    events = journal.marked(folder / journal.FILE_NAME, "started")
    started = [event for event in events if isinstance(event, Started) and event.trial == "main"]
    found = {"data digest": started[-1].data_digest, "data version": started[-1].data_version} if started else {}
    return {name: text for name, text in found.items() if text}


def environment_of(folder: Path) -> dict[str, str]:
    """Return what is recorded of a run's code, machine and installed packages."""
    opened = last_opened(folder)
    tags = {name.replace("_", " "): opened.tags[name] for name in _ENVIRONMENT if name in opened.tags}
    try:
        lines = (folder / ENVIRONMENT_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return tags
    platform = lines[0].removeprefix(_COMMENT).partition(", ")[2] if lines else ""
    packages = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith(_COMMENT))
    return {**tags, "platform": platform, **packages}


def last_opened(folder: Path) -> RunOpened:
    """Return the last start of a run that has been `summarized`."""
    events = journal.marked(folder / journal.FILE_NAME, "run_opened")
    return [event for event in events if isinstance(event, RunOpened)][-1]
