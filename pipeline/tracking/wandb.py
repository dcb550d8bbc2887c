"""Weights & Biases: one W&B run for each run, online or offline as ``wandb`` itself is set up."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.experiment.consistency import OWN_TAGS
from pipeline.protocol.events import AnyEvent, ArtifactSaved, RunClosed, RunOpened, SystemMetrics, Tagged
from pipeline.protocol.trial import EVALUATION
from pipeline.tracking.loggers import description, scalars, value_of

_FOLDER, _ADDRESS = "wandb", "wandb/url"
_LENGTH = 64  # W&B's limit of ids and tags
_RESERVED = re.compile(r"[/\\#?%:]")


class Tracker:
    """Tracker of one W&B run; its rows are numbered by the journal, so those that W&B has aren't sent again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._run: Any = None
        self._rows = self._known = 0
        self._exit_code = 1

    def receive(self, event: AnyEvent) -> None:
        """Send what the event has for W&B."""
        match event:
            case RunOpened() if self._run is None:
                self._run = _open_run(event, self._folder)
                self._known = self._run.step
            case RunOpened():  # a later session, perhaps with other parameters
                self._run.config.update(_config(event), allow_val_change=True)
            case ArtifactSaved():
                self._run.save(str(self._folder / event.path), base_path=str(self._folder), policy="now")
            case Tagged():
                self._run.config.update({"tags": dict(event.tags)}, allow_val_change=True)
            case RunClosed():
                self._run.notes = description(event)
                self._exit_code = int(event.status != "FINISHED")
        prefix = "" if event.trial in ("main", EVALUATION) else f"{event.trial}/"
        axis = "sample" if isinstance(event, SystemMetrics) else "step"
        rows: dict[int, dict[str, float]] = {}
        for name, step, value in scalars(event):
            rows.setdefault(step, {})[prefix + name] = value
        for step, values in sorted(rows.items()):
            if self._rows >= self._known:
                self._run.log({axis: step, "_timestamp": event.time, **values}, step=self._rows)
            self._rows += 1

    def close(self) -> None:
        """End the W&B run, and wait until W&B has it."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


def places(folder: Path) -> Iterator[str]:
    """Yield the run's address, or the command that sends what was kept offline."""
    with suppress(OSError):
        yield f"wandb    {(folder / _ADDRESS).read_text()}"
    yield from (f"wandb    wandb sync {path}" for path in sorted((folder / _FOLDER).glob("offline-run-*")))


def _open_run(event: RunOpened, folder: Path) -> Any:
    """Open the W&B run; one that was kept offline before is written again as a whole."""
    import wandb

    name = _RESERVED.sub("-", event.run)
    if len(name) > _LENGTH:
        name = f"{name[: _LENGTH - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    for earlier in (folder / _FOLDER).glob(f"offline-run-*-{name}"):
        shutil.rmtree(earlier)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or _RESERVED.sub("-", event.tracking_experiment),
        id=name,
        name=event.title or event.run,
        group=_RESERVED.sub("-", event.sweep) or None,
        job_type=event.tags.get("role"),
        config=_config(event),
        tags=[f"{tag}:{text}"[:_LENGTH] for tag, text in event.tags.items() if tag not in OWN_TAGS],
        dir=str(folder),
        resume="allow",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),  # of this process
    )
    run.define_metric("*", step_metric="step")
    run.define_metric("system/*", step_metric="sample")
    if run.url:
        (folder / _ADDRESS).write_text(run.url)
    return run


def _config(event: RunOpened) -> dict[str, Any]:
    """Return the parameters of a run as the sections of its experiment file, and its tags."""
    root: dict[str, Any] = {"tags": dict(event.tags)}
    for key, text in event.params.items():
        *sections, name = key.split(".")
        section = root
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value_of(text)
    return root
