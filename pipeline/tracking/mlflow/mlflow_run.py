"""Mapping of each event to calls of MLflow. Writing is idempotent, so any failure may be retried."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import singledispatchmethod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipeline.experiment.consistency import OWN_TAGS
from pipeline.protocol.events import (
    AnyEvent,
    ArtifactSaved,
    Evaluated,
    Event,
    Failed,
    Finished,
    Metrics,
    ModelExported,
    ModelSaved,
    Point,
    RunClosed,
    RunOpened,
    Started,
    SystemMetrics,
    Tagged,
    TrialOpened,
)
from pipeline.protocol.links import completed
from pipeline.protocol.trial import EVALUATION
from pipeline.tracking.mlflow import mlflow_entities as entities
from pipeline.tracking.mlflow.mlflow_runs import ERROR_TAG, TaggedRuns, experiment_id
from pipeline.tracking.mlflow.model import log_model
from pipeline.tracking.mlflow.registration import register
from pipeline.tracking.mlflow.store import artifact_root, create_store, run_page
from pipeline.tracking.trackers.scalars import scalars

if TYPE_CHECKING:
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

MAIN = "main"
"""Name of the main trial; its MLflow run is the parent of the measurements'."""
_BASELINE = "baseline"  # name of its trial

_METRICS_PER_CALL, _PARAMS_PER_CALL = 1000, 100  # MLflow's limits
_TABLES_TAG = "mlflow.loggedArtifacts"


class MlflowRun:
    """MLflow run of one run folder, with a child run for each measurement.

    Writing an event again adds nothing: MLflow runs are found by their tags, a metric point carries the time of its
    event, and MLflow stores equal points once.

    Args:
        folder: the run's folder.
        warn: called with each artifact or model that can't be logged.
        uri: URI of the store with credentials; empty for the URI in the run's first event.
        adds: True if the run has ended, and keeps its status.
    """

    def __init__(self, *, folder: "Path", warn: Callable[[str], None], uri: str = "", adds: bool = False) -> None:
        self.folder = folder
        self.uri = uri
        self.experiment_id = ""
        self.run_id = ""
        """MLflow's id of the run; empty until MLflow has answered."""
        self.uploads: deque[ArtifactSaved | ModelSaved] = deque()
        """Files to upload; metrics don't wait for them."""
        self.missing: list[str] = []
        """Files that are not sent, after a warning."""
        self._warn, self._adds = warn, adds
        self._client: MlflowClient
        self._runs: TaggedRuns
        self._children: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._logs_model = True
        self._models: list[ModelSaved] = []
        self._is_member = self._has_finished = False
        self._exported: ModelExported | None = None
        self._points: dict[str, list[Metric]] = {}

    def write(self, events: Iterable[AnyEvent]) -> None:
        """Write events in order, metrics in as few calls as MLflow allows; files are added to `uploads`.

        Raises:
            Exception: whatever MLflow raises; the same events may be written again.
        """
        self._points = {}
        for event in events:
            self._write(event)
        self._flush()

    def upload(self, event: ArtifactSaved | ModelSaved) -> None:
        """Upload the file or model of one of the `uploads`.

        Raises:
            Exception: whatever MLflow raises; the upload may be repeated.
        """
        if isinstance(event, ModelSaved):
            self._upload_model(event)
            return
        run_id, path = self._run(event), PurePosixPath(event.path)
        if not (self.folder / path).exists():
            self._warn(f"{self.folder / path} was deleted, so it is missing from the run's artifacts in MLflow")
            self.missing.append(event.path)
            return
        self._client.log_artifact(run_id, str(self.folder / path), str(path.parent) if path.parent.name else None)
        if path.name.endswith("_table.json"):
            marked = self._client.get_run(run_id).data.tags.get(_TABLES_TAG, "[]")
            self._client.set_tag(run_id, _TABLES_TAG, entities.marked_table(marked, str(path)))

    def _upload_model(self, event: ModelSaved) -> None:
        """Log a model with a signature; without an example of its inputs, log its weights only."""
        run_id = self._runs.of(event.run, trial=MAIN) if event.run else self.run_id
        folder = self.folder / PurePosixPath(event.run).name if event.run else self.folder
        if event.example:
            if not log_model(self._client, event, self._exported, run_id=run_id, folder=folder, warn=self._warn):
                self.missing.append("its model")
        else:
            self._client.log_artifact(run_id, str(folder / event.weights), str(PurePosixPath(event.weights).parent))
            self._warn(
                "only the model's weights are logged to MLflow, because the task calls it with more than tensors"
            )
        is_due = event.registered and (event.run or not self._is_member)
        if is_due and self._has_finished and event == self._models[-1]:
            register(self._client, event, run_id=run_id, warn=self._warn)

    @singledispatchmethod
    def _write(self, event: Event) -> None:
        """Skip events without a place in MLflow (FirstStep, Warned); the journal and the log have them."""

    @_write.register
    def _(self, event: RunOpened) -> None:
        from mlflow import MlflowClient

        uri = self.uri or event.tracking_uri
        create_store(uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.experiment_id = experiment_id(self._client, event.tracking_experiment, root=artifact_root(uri))
        self._runs = TaggedRuns(self._client, name=event.run, experiment=self.experiment_id, reopens=not self._adds)
        source = {"mlflow.source.name": "pipeline", "mlflow.source.type": "LOCAL"}
        # MLflow shows tags in the order in which a run got them, and people read this one first.
        speedup = {"speedup": "not measured"} if _BASELINE in event.trials else {}
        tags = {**source, **speedup, **event.tags}
        if event.sweep:
            tags |= {"mlflow.parentRunId": self._runs.of(event.sweep, trial=MAIN), "sweep": event.sweep}
        self.run_id = self._runs.open(event, trial=MAIN, title=entities.name_run(event), tags=tags)
        self._errors = {}
        self._logs_model, self._is_member = event.logs_model, bool(event.sweep)
        is_sweep = event.tags.get("role") == "sweep"
        params = entities.shared_params(event.params) if is_sweep else event.params
        if (warning := entities.describe_renamed(params)) and not event.sweep:  # the sweep's own run warns of it
            self._warn(warning)
        named = {name: value for name, value in event.tags.items() if name not in OWN_TAGS}  # perhaps new ones
        self._describe(self.run_id, params=params, tags=named)

    @_write.register
    def _(self, event: TrialOpened) -> None:
        if event.repeat or event.trial == EVALUATION:  # whose values are the run's own
            return
        if event.role == "main":
            self._describe(self.run_id, params=event.params, tags=event.tags)
            return
        tags = {"mlflow.parentRunId": self.run_id, **event.tags, "role": event.role}
        run_id = self._runs.open(event, trial=event.trial, title=entities.name_trial(event), tags=tags)
        self._children[event.trial] = run_id
        self._describe(run_id, params=event.params)

    @_write.register
    def _(self, event: Started) -> None:
        run_id = self._run(event)
        tags = {"devices": "; ".join(event.devices)}
        tags |= {"start_from": str(event.loaded)} if event.loaded is not None else {}
        self._describe(run_id, params=entities.counts(event), tags=tags)
        self._client.log_inputs(run_id, datasets=entities.datasets(event))

    @_write.register
    def _(self, event: Metrics | SystemMetrics) -> None:
        self._add(event, scalars(event))

    @_write.register
    def _(self, event: Finished) -> None:
        if event.result.repeat:
            return
        self._add(event, scalars(event))
        if (best := event.result.best) is not None:
            tags = {"best_step": str(best.step), "best_metric": best.metric, "best_value": f"{best.value:.6g}"}
            self._describe(self._run(event), tags=tags)
        if event.trial in self._children:
            self._flush()  # before the run ends, here and below: no finished run may lack metrics
            self._runs.end(self._run(event), event, status="FINISHED")

    @_write.register
    def _(self, event: Evaluated) -> None:
        self._add(event, scalars(event))
        tags = {"evaluated": event.subject, "evaluated_changes": "; ".join(event.changes) or "none"}
        self._describe(self._run(event), tags=tags)

    @_write.register
    def _(self, event: Failed) -> None:
        if event.trial == EVALUATION:  # the run itself hasn't failed
            return
        message = f"rank {event.rank.rank} on {event.rank.node}: {event.error.partition(chr(10))[0]}"
        self._describe(self._run(event), tags={ERROR_TAG: self._errors.setdefault(event.trial, message)})

    @_write.register
    def _(self, event: ArtifactSaved) -> None:
        if not any(isinstance(due, ArtifactSaved) and due.path == event.path for due in self.uploads):
            self.uploads.append(event)

    @_write.register
    def _(self, event: ModelSaved) -> None:
        self._exported = None  # what was exported were earlier weights
        if self._logs_model and event not in self._models:
            self._models.append(event)  # exported at the end: it uses cores, and a measurement may follow

    @_write.register
    def _(self, event: ModelExported) -> None:
        self._exported = event

    @_write.register
    def _(self, event: Tagged) -> None:
        tags = dict(event.tags)
        if "best_run" in tags:
            tags["best_run_id"] = self._runs.of(tags["best_run"], trial=MAIN)  # ids differ between stores
        self._describe(self._runs.of(event.run, trial=event.trial), tags=tags)

    @_write.register
    def _(self, event: RunClosed) -> None:
        self._flush()
        self._has_finished = event.status == "FINISHED"
        self.uploads.extend(model for model in self._models if model not in self.uploads)
        if note := "\n\n".join(part for part in (event.message, completed(event.summary, self._page)) if part):
            self._describe(self.run_id, tags={"mlflow.note.content": note})
        self._runs.end(self.run_id, event, status=event.status)
        self._runs.end_all(event)

    def _page(self, run: str) -> str | None:
        """Return the address of a run that a summary links to, relative to that of its description."""
        try:
            return run_page("", self.experiment_id, self._runs.of(run, trial=MAIN))
        except LookupError:  # a trial that has sent nothing yet
            return None

    def _run(self, event: Event) -> str:
        return self._children.get(event.trial, self.run_id)

    def _describe(
        self, run_id: str, *, params: Mapping[str, str] | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        given = entities.params(params or {})
        for start in range(0, len(given), _PARAMS_PER_CALL):
            self._log_params(run_id, given[start : start + _PARAMS_PER_CALL])
        if tags:
            self._client.log_batch(run_id, tags=entities.tags(tags), synchronous=True)

    def _log_params(self, run_id: str, params: "list[Param]") -> None:
        """Log parameters; those that a resumed run has changed become tags, since MLflow keeps the first value."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run_id, params=params, synchronous=True)
        except MlflowException:
            known = self._client.get_run(run_id).data.params
            changed = {f"changed.{one.key}": one.value for one in params if known.get(one.key, one.value) != one.value}
            if not changed:
                raise
            new = [one for one in params if one.key not in known]
            self._client.log_batch(run_id, params=new, tags=entities.tags(changed), synchronous=True)

    def _add(self, event: Event, points: Iterable[Point]) -> None:
        metrics = entities.metrics(points, timestamp=entities.milliseconds(event))
        self._points.setdefault(self._run(event), []).extend(metrics)

    def _flush(self) -> None:
        for run_id, metrics in self._points.items():
            for start in range(0, len(metrics), _METRICS_PER_CALL):
                self._client.log_batch(run_id, metrics=metrics[start : start + _METRICS_PER_CALL], synchronous=True)
        self._points = {}
