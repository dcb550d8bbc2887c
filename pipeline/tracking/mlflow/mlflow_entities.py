"""Conversion of events to MLflow's entities and names, cut to MLflow's limits. Nothing here calls the store."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pipeline.experiment.reported import mlflow_name, mlflow_names
from pipeline.experiment.sweep import Parameter
from pipeline.protocol.events import Event, Point, RunOpened, Started, TrialOpened
from pipeline.protocol.numbers import is_of_whole_run
from pipeline.wording import format_parallel, join_names

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Param, RunTag

_PARAM_LENGTH, _TAG_LENGTH = 6000, 8000
_VERSION_LENGTH = 100
_CUT = " ... [cut]"
_MOST_NAMES = 3
_PARAMETER = re.compile(rf"sweep\.parameters\.(.+)\.(?:{'|'.join(Parameter.model_fields)})(?:\[.*)?")
_MLFLOW_TAGS = {"git_commit": "mlflow.source.git.commit", "user": "mlflow.user"}
"""MLflow's names of tags that its UI shows specially, by our names."""


def name_run(event: RunOpened) -> str:
    """Name a run, e.g. "ddp, 2 workers" or "sweep"; ``tracking.run_name`` and the title of a sweep's trial come first.

    The id of the run, the name of its folder, is a tag.
    """
    role = event.tags.get("role", "main")
    if event.title or role != "main":
        return event.title or role
    workers = format_parallel(event.tags["strategy"], int(event.tags["world_size"]))
    return f"quick test: {workers}" if event.tags.get("quick") == "true" else workers


def name_trial(event: TrialOpened) -> str:
    """Name a measurement by its role, e.g. "baseline: 1 worker"."""
    return f"{event.role}: {event.title}" if event.role in {"baseline", "reference"} else event.title


def milliseconds(event: Event) -> int:
    """Return the event's time in milliseconds since the epoch; a replay gives equal points."""
    return round(event.time * 1000)


def metrics(points: Iterable[Point], *, timestamp: int) -> "list[Metric]":
    """Convert metric points; ``timestamp`` in milliseconds since the epoch.

    A figure of the whole run gets step 0, where MLflow draws bars, one for each run; at a later step it draws a line of
    a single dot.
    """
    from mlflow.entities import Metric

    return [
        Metric(metric_name(name), value, timestamp, 0 if is_of_whole_run(name) else step)
        for name, step, value in points
    ]


def metric_name(name: str) -> str:
    """Return MLflow's name of a metric."""
    return mlflow_name(name)


def shared_params(params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a run; of a sweep those that all trials share, as no trial has the file's own values.

    Args:
        params: flattened parameters of the run.
    """
    varied = {found[1] for name in params if (found := _PARAMETER.fullmatch(name))}
    return {name: value for name, value in params.items() if not any(_is_part(name, of=key) for key in varied)}


def _is_part(name: str, *, of: str) -> bool:
    return name == of or name.startswith((f"{of}.", f"{of}["))


def params(values: Mapping[str, str]) -> "list[Param]":
    """Convert parameters."""
    from mlflow.entities import Param

    names = mlflow_names(values)
    return [Param(names[name], _cut(value, _PARAM_LENGTH)) for name, value in values.items()]


def describe_renamed(names: Iterable[str]) -> str:
    """Return a warning that names parameters which MLflow has under other names; empty if none."""
    # The brackets of lists, e.g. optimizer.params[0].lr, are no surprise.
    renamed = [
        f"{name} is {accepted}"
        for name, accepted in mlflow_names(names).items()
        if accepted != name.replace("[", "_").replace("]", "_")
    ]
    if not renamed:
        return ""
    more = f" (and {len(renamed) - _MOST_NAMES} more)" if len(renamed) > _MOST_NAMES else ""
    return f"MLflow does not accept these names of parameters. There, {join_names(renamed[:_MOST_NAMES])}{more}."


def tags(values: Mapping[str, str]) -> "list[RunTag]":
    """Convert tags; those that MLflow's UI knows by another name are written under both names."""
    from mlflow.entities import RunTag

    known = {theirs: values[ours] for ours, theirs in _MLFLOW_TAGS.items() if ours in values}
    return [RunTag(mlflow_name(name), _cut(value, _TAG_LENGTH)) for name, value in {**values, **known}.items()]


def datasets(event: Started) -> "list[DatasetInput]":
    """Describe the training set, and the validation set if there is one; nothing without a digest, in measurements."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    counts = {"train": event.train_samples, "validation": event.validation_samples}
    source = json.dumps({"tags": {"mlflow.source.name": event.data_name}})
    version = f", version {_cut(event.data_version, _VERSION_LENGTH)}" if event.data_version else ""
    return [
        DatasetInput(
            Dataset(
                name=f"{event.data_name}/{part}{version}",  # MLflow shows the digest next to it
                digest=event.data_digest[:36],
                source_type="code",
                source=source,
                profile=json.dumps({"num_rows": samples}),
            ),
            tags=[InputTag("mlflow.data.context", part)],
        )
        for part, samples in counts.items()
        if samples and event.data_digest
    ]


def counts(event: Started) -> dict[str, str]:
    """Return the sizes of a training (steps, samples, parameters) as MLflow parameters."""
    names = {"total_steps", "steps_per_epoch", "epochs", "train_samples", "validation_samples", "parameters"}
    names |= {"frozen"} if event.frozen else set()
    names |= {"data_version"} if event.data_version else set()
    return {name: str(value) for name, value in event.model_dump(include=names).items()}


def marked_table(tag: str, path: str) -> str:
    """Return the value of the tag ``mlflow.loggedArtifacts`` with this artifact added as a table."""
    entries = json.loads(tag)
    entry = {"path": path, "type": "table"}
    return json.dumps(entries if entry in entries else [*entries, entry])


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - len(_CUT)] + _CUT
