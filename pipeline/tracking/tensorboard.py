"""TensorBoard's event files: scalars, hyperparameters, pictures and the summary; one TensorBoard run for each trial.

They are written with TensorBoard's own library, which needs no TensorFlow, and neither torch, which takes seconds.
"""

import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.protocol.events import AnyEvent, ArtifactSaved, RunClosed, RunOpened
from pipeline.protocol.trial import EVALUATION
from pipeline.tracking.loggers import description, scalars, value_of

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FOLDER = "tensorboard"
_FLUSH_S = 5
_PNG_SIZE = slice(16, 24)  # width and height in the header
_RGBA = 4


class Tracker:
    """Tracker that writes the events of each trial to ``tensorboard/TRIAL``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, EventFileWriter] = {}
        shutil.rmtree(folder / _FOLDER, ignore_errors=True)  # of an earlier session, whose events come again

    def receive(self, event: AnyEvent) -> None:
        """Write what the event has for TensorBoard."""
        match event:
            case RunOpened():
                self._write(event, _hyperparameters(event.params, metrics=event.directions, began=event.time))
                self._write(event, _text("tags", "\n".join(f"- {name}: {value}" for name, value in event.tags.items())))
            case ArtifactSaved() if event.path.endswith(".png") and (path := self._folder / event.path).exists():
                self._write(event, _picture(event.path, path.read_bytes()))
            case RunClosed():
                self._write(event, _text("summary", description(event)))
                self._write(event, _end(has_finished=event.status == "FINISHED", ended=event.time))
        for name, step, value in scalars(event):
            self._write(event, _summary(tag=name, simple_value=value), step=step)

    def close(self) -> None:
        """Write what is left to the disk."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, event: AnyEvent, summary: "Summary", *, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        trial = "main" if event.trial == EVALUATION else event.trial
        if trial not in self._writers:
            self._writers[trial] = EventFileWriter(str(self._folder / _FOLDER / trial), flush_secs=_FLUSH_S)
        self._writers[trial].add_event(Event(wall_time=event.time, step=step, summary=summary))


def places(folder: Path) -> Iterator[str]:
    """Yield the command that shows the run."""
    if (path := folder / _FOLDER).exists():
        yield f"tensorboard --logdir {path}"


def _summary(**fields: Any) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(**fields)])


def _hyperparameters(params: Mapping[str, str], *, metrics: Mapping[str, object], began: float) -> "Summary":
    """Return the summary of the HParams tab; its metrics are the validation's."""
    from tensorboard.plugins.hparams import summary_v2 as api  # the package's own "api" imports TensorFlow

    values = {name: value_of(text) for name, text in params.items()}
    plain = {name: value if isinstance(value, bool | int | float) else params[name] for name, value in values.items()}
    config = api.hparams_config_pb(
        hparams=[api.HParam(name) for name in plain], metrics=[api.Metric(name) for name in metrics]
    )
    config.MergeFrom(api.hparams_pb(plain, start_time_secs=began))
    return config


def _end(*, has_finished: bool, ended: float) -> "Summary":
    """Return the summary of the HParams tab on the end of the run."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if has_finished else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    return _summary(tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(data))


def _text(name: str, markdown: str) -> "Summary":
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
    return _summary(tag=name, metadata=create_summary_metadata(name, ""), tensor=tensor)


def _picture(name: str, png: bytes) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[_PNG_SIZE])
    image = Summary.Image(height=height, width=width, colorspace=_RGBA, encoded_image_string=png)
    return _summary(tag=name, image=image)
