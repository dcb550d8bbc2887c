"""MLflow's experiment, and the runs of one run folder: found by their tags, ended together."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import ResourceError
from pipeline.experiment.uris import without_credentials
from pipeline.protocol.events import Event, RunClosed
from pipeline.protocol.labels import Status
from pipeline.tracking.mlflow import mlflow_entities as entities

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "pipeline.run"
TRIAL_TAG = "pipeline.trial"
ERROR_TAG = "error"
"""Tag with a failed run's first error."""


def experiment_id(client: "MlflowClient", name: str, *, root: str | None) -> str:
    """Return the id of an MLflow experiment; create it with the artifact location ``root`` unless it exists.

    Raises:
        ResourceError: the experiment was deleted.
        MlflowException: the store's.
    """
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        if found.lifecycle_stage == "deleted":
            raise ResourceError(
                f"the experiment {name} was deleted in MLflow. Restore it: MLFLOW_TRACKING_URI="
                f"{without_credentials(client.tracking_uri)} mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=root))
    except MlflowException:
        if found := client.get_experiment_by_name(name):  # another run has created it meanwhile
            return str(found.experiment_id)
        raise


class TaggedRuns:
    """MLflow runs tagged with a run's name, one for each trial.

    Args:
        client: client of the store.
        name: name of the run's folder.
        experiment: MLflow's id of the experiment.
        reopens: True if runs that exist continue.
    """

    def __init__(self, client: "MlflowClient", *, name: str, experiment: str, reopens: bool = True) -> None:
        self._client = client
        self._name = name
        self._experiment = experiment
        self._reopens = reopens

    def open(self, event: Event, *, trial: str, title: str, tags: Mapping[str, str]) -> str:
        """Open a trial's MLflow run, created unless it exists; return its id."""
        if found := self._found({RUN_TAG: self._name, TRIAL_TAG: trial}):
            run = max(found, key=_content)
            if self._reopens:
                self._client.update_run(run.info.run_id, status="RUNNING")
            if ERROR_TAG in run.data.tags:  # of the session before
                self._client.delete_tag(run.info.run_id, ERROR_TAG)
            return str(run.info.run_id)
        given = entities.tags({**tags, RUN_TAG: self._name, TRIAL_TAG: trial})
        time = entities.milliseconds(event)
        run = self._client.create_run(self._experiment, time, {tag.key: tag.value for tag in given}, title)
        return str(run.info.run_id)

    def of(self, name: str, *, trial: str) -> str:
        """Return the id of the MLflow run of another run folder, e.g. of this trial's sweep.

        Raises:
            LookupError: MLflow doesn't have the run yet.
        """
        if not (found := self._found({RUN_TAG: name, TRIAL_TAG: trial})):
            raise LookupError(f"{name} isn't in MLflow yet. Send it with pipeline sync")
        return str(max(found, key=_content).info.run_id)

    def end(self, run_id: str, event: Event, *, status: Status) -> None:
        """End one run."""
        self._client.set_terminated(run_id, status=status, end_time=entities.milliseconds(event))

    def end_all(self, event: RunClosed) -> None:
        """End all open runs, and delete empty duplicates.

        A server may create a run although its answer is lost; a retry then creates the run that is used.
        """
        runs = self._found({RUN_TAG: self._name})
        used = Counter(run.data.tags[TRIAL_TAG] for run in runs if _content(run))
        for run in runs:
            if not _content(run) and used[run.data.tags[TRIAL_TAG]]:
                self._client.delete_run(run.info.run_id)
            elif run.info.status == "RUNNING":
                self.end(run.info.run_id, event, status=event.status)

    def _found(self, tags: Mapping[str, str]) -> "list[Run]":
        where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        return list(self._client.search_runs([self._experiment], filter_string=where))


def _content(run: "Run") -> int:
    """Count the parameters and metrics of a run."""
    return len(run.data.params) + len(run.data.metrics)


def delete_runs(uri: str, *, experiment: str, name: str) -> None:
    """Delete the MLflow runs of a run folder and of its trials' folders; MLflow can restore them.

    Raises:
        MlflowException: the store's.
    """
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    where = f"tags.`{RUN_TAG}` LIKE '{name}%'"
    while found := client.search_runs([experiment], filter_string=where):  # a page of those that are left
        for run in found:
            client.delete_run(run.info.run_id)
