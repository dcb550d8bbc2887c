"""MLflow runs of one run folder: what each event becomes there, and MLflow's names and limits.

Writing an event again adds nothing: MLflow runs are found by their tags, a metric point carries the time of its event,
and MLflow stores equal points once. So any failure may be retried.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pipeline.errors import ResourceError
from pipeline.experiment.consistency import OWN_TAGS
from pipeline.experiment.reported import mlflow_name, mlflow_names
from pipeline.experiment.sweep import Parameter
from pipeline.experiment.uris import without_credentials
from pipeline.protocol import events as of
from pipeline.protocol.events import AnyEvent, ArtifactSaved, Event, ModelSaved, Point, RunClosed, RunOpened, Started
from pipeline.protocol.trial import EVALUATION, Status
from pipeline.protocol.trial_result import is_of_whole_run
from pipeline.tracking.loggers import scalars
from pipeline.tracking.model import RUN_TAG, log_model, register
from pipeline.tracking.store import TrackingOutcome, artifact_root, create_store
from pipeline.wording import format_parallel

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Run, RunTag

MAIN = "main"  # Name of the main trial; its MLflow run is the parent of the measurements'
_BASELINE = "baseline"  # name of its trial
TRIAL_TAG = "pipeline.trial"
_ERROR_TAG = "error"  # a failed run's first error
_TABLES_TAG = "mlflow.loggedArtifacts"
METRICS_PER_CALL = 1000
_PARAMS_PER_CALL, _PARAM_LENGTH, _TAG_LENGTH, _VERSION_LENGTH = 100, 6000, 8000, 100  # MLflow's limits
_CUT = " ... [cut]"
_PARAMETER = re.compile(rf"sweep\.parameters\.(.+)\.(?:{'|'.join(Parameter.model_fields)})(?:\[.*)?")
_MLFLOW_TAGS = {"git_commit": "mlflow.source.git.commit", "user": "mlflow.user"}
"""MLflow's names of tags that its UI shows specially, by our names."""


class MlflowRun:
    """MLflow run of one run folder, with a child run for each measurement; updates ``sent``, but does not write it."""

    def __init__(
        self,
        folder: Path,
        *,
        client: "MlflowClient",
        opened: RunOpened,
        sent: TrackingOutcome,
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self.client, self.sent, self._warn = folder, client, sent, warn
        self._name, self._experiment_name = opened.run, opened.tracking_experiment
        self._points: dict[str, list[Metric]] = {}

    def is_known(self) -> bool:
        """Return True if the store still has the run."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.get_run(self.sent.run_id).info.lifecycle_stage) == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def write(self, events: Iterable[AnyEvent]) -> None:
        """Write events in order, metrics in as few calls as MLflow allows; after an exception it may be repeated."""
        self._points = {}
        for event in events:
            self._write(event)
        self._flush()

    def _write(self, event: AnyEvent) -> None:
        """Write one event; FirstStep, Warned and others without a place in MLflow are in the journal and the log."""
        sent = self.sent
        if points := scalars(event):
            added = metrics(points, timestamp=milliseconds(event))
            self._points.setdefault(self._run(event), []).extend(added)
        match event:
            case RunOpened():
                self._open(event)
            case of.TrialOpened() if event.repeat or event.trial == EVALUATION:  # whose values are the run's own
                pass
            case of.TrialOpened() if event.role == "main":
                self._describe(sent.run_id, params=event.params, tags=event.tags)
            case of.TrialOpened():
                tags = {"mlflow.parentRunId": sent.run_id, **event.tags, "role": event.role}
                title = f"{event.role}: {event.title}" if event.role in ("baseline", "reference") else event.title
                child = self._find_or_create(event, trial=event.trial, title=title, tags=tags)
                sent.children[event.trial] = child
                self._describe(child, params=event.params)
            case Started():
                tags = {"devices": "; ".join(event.devices)}
                tags |= {"start_from": str(event.loaded)} if event.loaded is not None else {}
                names = {
                    "total_steps",
                    "steps_per_epoch",
                    "epochs",
                    "train_samples",
                    "validation_samples",
                    "parameters",
                }
                names |= {name for name in ("frozen", "data_version") if getattr(event, name)}
                sizes = {name: str(value) for name, value in event.model_dump(include=names).items()}
                self._describe(self._run(event), params=sizes, tags=tags)
                self.client.log_inputs(self._run(event), datasets=datasets(event))
            case of.Finished() if not event.result.repeat:
                if (best := event.result.best) is not None:
                    tags = {"best_step": str(best.step), "best_metric": best.metric, "best_value": f"{best.value:.6g}"}
                    self._describe(self._run(event), tags=tags)
                if event.trial in sent.children:
                    self._flush()  # before the run ends, here and below: no finished run may lack metrics
                    self._end(self._run(event), event, status="FINISHED")
            case of.Evaluated():
                changes = "; ".join(event.changes) or "none"
                self._describe(self._run(event), tags={"evaluated": event.subject, "evaluated_changes": changes})
            case of.Failed() if event.trial != EVALUATION:  # else the run itself hasn't failed
                message = f"rank {event.rank.rank} on {event.rank.node}: {event.error.partition(chr(10))[0]}"
                self._describe(self._run(event), tags={_ERROR_TAG: sent.errors.setdefault(event.trial, message)})
            case ArtifactSaved():
                if not any(isinstance(due, ArtifactSaved) and due.path == event.path for due in sent.uploads):
                    sent.uploads.append(event)
            case ModelSaved():
                sent.exported = None  # what was exported were earlier weights
                if sent.logs_model and event not in sent.models:
                    sent.models.append(event)
            case of.ModelExported():
                sent.exported = event
            case of.Tagged():
                tags = dict(event.tags)
                if "best_run" in tags:
                    tags["best_run_id"] = self.id_of(tags["best_run"])  # ids differ between stores
                self._describe(self.id_of(event.run, trial=event.trial), tags=tags)
            case RunClosed():
                self._close(event)

    def upload(self, event: ArtifactSaved | ModelSaved) -> None:
        """Upload the file or model of one of the uploads; after an exception of MLflow it may be repeated."""
        if isinstance(event, ModelSaved):
            self._upload_model(event)
            return
        run_id, path = self._run(event), PurePosixPath(event.path)
        if not (self.folder / path).exists():
            self._warn(f"{self.folder / path} was deleted, so it is missing from the run's artifacts in MLflow")
            self.sent.missing.append(event.path)
            return
        self.client.log_artifact(run_id, str(self.folder / path), str(path.parent) if path.parent.name else None)
        if path.name.endswith("_table.json"):
            tables = json.loads(self.client.get_run(run_id).data.tags.get(_TABLES_TAG, "[]"))
            if (entry := {"path": str(path), "type": "table"}) not in tables:
                self.client.set_tag(run_id, _TABLES_TAG, json.dumps([*tables, entry]))

    def _upload_model(self, event: ModelSaved) -> None:
        """Log a model with a signature; without an example of its inputs, log its weights only."""
        sent = self.sent
        run_id = self.id_of(event.run) if event.run else sent.run_id
        folder = self.folder / PurePosixPath(event.run).name if event.run else self.folder
        if event.example:
            if not log_model(self.client, event, sent.exported, run_id=run_id, folder=folder, warn=self._warn):
                sent.missing.append("its model")
        else:
            self.client.log_artifact(run_id, str(folder / event.weights), str(PurePosixPath(event.weights).parent))
            self._warn(
                "only the model's weights are logged to MLflow, because the task calls it with more than tensors"
            )
        is_due = event.registered and (event.run or not sent.is_trial)
        if is_due and sent.has_finished and event == sent.models[-1]:
            register(self.client, event, run_id=run_id, warn=self._warn)

    def _open(self, event: RunOpened) -> None:
        """Open the run: create it unless it exists, or continue it."""
        sent, tags = self.sent, dict(event.tags)
        create_store(self.client.tracking_uri)
        sent.experiment_id = self._find_experiment()
        # MLflow shows tags in the order in which a run got them, and people read this one first.
        speedup = {"speedup": "not measured"} if _BASELINE in event.trials else {}
        tags = {"mlflow.source.name": "pipeline", "mlflow.source.type": "LOCAL", **speedup, **tags}
        if event.sweep:
            tags |= {"mlflow.parentRunId": self.id_of(event.sweep), "sweep": event.sweep}
        sent.run_id = self._find_or_create(event, trial=MAIN, title=name_run(event), tags=tags)
        sent.errors, sent.logs_model, sent.is_trial = {}, event.logs_model, bool(event.sweep)
        params = shared_params(event.params) if event.tags.get("role") == "sweep" else event.params
        named = {name: value for name, value in event.tags.items() if name not in OWN_TAGS}  # perhaps new ones
        self._describe(sent.run_id, params=params, tags=named)

    def _find_experiment(self) -> str:
        """Return MLflow's id of the experiment; create it unless it exists."""
        from mlflow.exceptions import MlflowException

        name = self._experiment_name
        if (found := self.client.get_experiment_by_name(name)) is None:
            try:
                return str(
                    self.client.create_experiment(name, artifact_location=artifact_root(self.client.tracking_uri))
                )
            except MlflowException:
                if (found := self.client.get_experiment_by_name(name)) is None:  # else another run has just created it
                    raise
        if found.lifecycle_stage == "deleted":
            raise ResourceError(
                f"the experiment {name} was deleted in MLflow. Restore it: MLFLOW_TRACKING_URI="
                f"{without_credentials(self.client.tracking_uri)} mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _find_or_create(self, event: Event, *, trial: str, title: str, tags: Mapping[str, str]) -> str:
        """Return the id of a trial's MLflow run, which continues if it exists."""
        if found := self._runs({RUN_TAG: self._name, TRIAL_TAG: trial}):
            run = max(found, key=_content)
            self.client.update_run(run.info.run_id, status="RUNNING")
            if _ERROR_TAG in run.data.tags:  # of the session before
                self.client.delete_tag(run.info.run_id, _ERROR_TAG)
            return str(run.info.run_id)
        given = {tag.key: tag.value for tag in to_tags({**tags, RUN_TAG: self._name, TRIAL_TAG: trial})}
        run = self.client.create_run(self.sent.experiment_id, milliseconds(event), given, title)
        return str(run.info.run_id)

    def id_of(self, name: str, *, trial: str = MAIN) -> str:
        """Return the id of another run folder's MLflow run; LookupError if MLflow doesn't have it yet."""
        if not (found := self._runs({RUN_TAG: name, TRIAL_TAG: trial})):
            raise LookupError(f"{name} isn't in MLflow yet. Send it with pipeline sync")
        return str(max(found, key=_content).info.run_id)

    def _runs(self, tags: Mapping[str, str]) -> "list[Run]":
        where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        return list(self.client.search_runs([self.sent.experiment_id], filter_string=where))

    def _end(self, run_id: str, event: Event, *, status: Status) -> None:
        self.client.set_terminated(run_id, status=status, end_time=milliseconds(event))

    def _close(self, event: RunClosed) -> None:
        """Describe and end the run and all open ones; delete duplicates, made by servers whose answers were lost."""
        sent = self.sent
        self._flush()
        sent.has_finished = event.status == "FINISHED"
        sent.uploads += [model for model in sent.models if model not in sent.uploads]
        if note := "\n\n".join(filter(None, (event.message, event.summary))):
            self._describe(sent.run_id, tags={"mlflow.note.content": note})
        self._end(sent.run_id, event, status=event.status)
        runs = self._runs({RUN_TAG: self._name})
        used = {run.data.tags[TRIAL_TAG] for run in runs if _content(run)}
        for run in runs:
            if not _content(run) and run.data.tags[TRIAL_TAG] in used:
                self.client.delete_run(run.info.run_id)
            elif run.info.status == "RUNNING":
                self._end(run.info.run_id, event, status=event.status)

    def _run(self, event: Event) -> str:
        return self.sent.children.get(event.trial, self.sent.run_id)

    def _describe(
        self, run_id: str, *, params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Log tags and parameters; a parameter that a resumed run changes is a tag: MLflow keeps the first value."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        names = mlflow_names(params or {})
        given = [Param(names[name], _cut(value, _PARAM_LENGTH)) for name, value in (params or {}).items()]
        for start in range(0, len(given), _PARAMS_PER_CALL):
            some = given[start : start + _PARAMS_PER_CALL]
            try:
                self.client.log_batch(run_id, params=some, synchronous=True)
            except MlflowException:
                known = self.client.get_run(run_id).data.params
                changed = {
                    f"changed.{one.key}": one.value for one in some if known.get(one.key, one.value) != one.value
                }
                if not changed:
                    raise
                new = [one for one in some if one.key not in known]
                self.client.log_batch(run_id, params=new, tags=to_tags(changed), synchronous=True)
        if tags:
            self.client.log_batch(run_id, tags=to_tags(tags), synchronous=True)

    def _flush(self) -> None:
        for run_id, points in self._points.items():
            for start in range(0, len(points), METRICS_PER_CALL):
                self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_CALL], synchronous=True)
        self._points = {}


def _content(run: "Run") -> int:
    """Count the parameters and metrics of a run."""
    return len(run.data.params) + len(run.data.metrics)


def delete_runs(uri: str, *, experiment: str, name: str) -> None:
    """Delete the MLflow runs of a run folder and of its trials' folders; MLflow can restore them."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    where = f"tags.`{RUN_TAG}` LIKE '{name}%'"
    while found := client.search_runs([experiment], filter_string=where):  # a page of those that are left
        for run in found:
            client.delete_run(run.info.run_id)


def name_run(event: RunOpened) -> str:
    """Name a run by its own title, or else e.g. "ddp, 2 workers" or "sweep"; its id is a tag."""
    role = event.tags.get("role", "main")
    if event.title or role != "main":
        return event.title or role
    workers = format_parallel(event.tags["strategy"], int(event.tags["world_size"]))
    return f"quick test: {workers}" if event.tags.get("quick") == "true" else workers


def milliseconds(event: Event) -> int:
    """Return the event's time in milliseconds since the epoch; a replay gives equal points."""
    return round(event.time * 1000)


def metrics(points: Iterable[Point], *, timestamp: int) -> "list[Metric]":
    """Convert metric points; a figure of the whole run gets step 0, where MLflow draws bars instead of a single dot."""
    from mlflow.entities import Metric

    return [
        Metric(mlflow_name(name), value, timestamp, 0 if is_of_whole_run(name) else step)
        for name, step, value in points
    ]


def shared_params(params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a sweep that all trials share, as no trial has the file's own values of the others."""
    varied = {found[1] for name in params if (found := _PARAMETER.fullmatch(name))}
    parts = tuple(f"{key}{sign}" for key in varied for sign in ".[")
    return {name: value for name, value in params.items() if name not in varied and not name.startswith(parts)}


def to_tags(values: Mapping[str, str]) -> "list[RunTag]":
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


def _cut(value: str, length: int) -> str:
    return value if len(value) <= length else value[: length - len(_CUT)] + _CUT
