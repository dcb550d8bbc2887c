"""TensorBoard's event files: scalars, hyperparameters and the summary; one TensorBoard run for each trial."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.protocol.events import AnyEvent, RunClosed, RunOpened
from pipeline.protocol.trial import EVALUATION
from pipeline.tracking.loggers import description, scalars, value_of

_FOLDER = "tensorboard"
_FLUSH_S = 5


class Tracker:
    """Tracker that writes the events of each trial to ``tensorboard/TRIAL``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._writers: dict[str, Any] = {}
        self._end: Any = None  # what marks the hyperparameters' run as finished
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier session, whose events come again

    def receive(self, event: AnyEvent) -> None:
        """Write what the event has for TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        trial = "main" if event.trial == EVALUATION else event.trial
        if trial not in self._writers:
            self._writers[trial] = SummaryWriter(str(self._folder / trial), flush_secs=_FLUSH_S)
        writer = self._writers[trial]
        match event:
            case RunOpened():
                values = {name: value_of(text) for name, text in event.params.items()}
                plain = {name: v if isinstance(v, int | float) else event.params[name] for name, v in values.items()}
                *opening, self._end = hparams(plain, dict.fromkeys(event.directions, 0))  # type: ignore[no-untyped-call]
                for summary in opening:
                    writer.file_writer.add_summary(summary, 0, event.time)
                writer.add_text("tags", "\n".join(f"- {name}: {text}" for name, text in event.tags.items()), 0)
            case RunClosed():
                writer.add_text("summary", description(event), 0)
                if event.status == "FINISHED":
                    writer.file_writer.add_summary(self._end, 0, event.time)
        for name, step, value in scalars(event):
            writer.add_scalar(name, value, step, walltime=event.time)

    def close(self) -> None:
        """Write what is left to the disk."""
        for writer in self._writers.values():
            writer.close()


def places(folder: Path) -> Iterator[str]:
    """Yield the command that shows the run."""
    if (path := folder / _FOLDER).exists():
        yield f"tensorboard --logdir {path}"
