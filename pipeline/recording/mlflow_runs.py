"""The MLflow runs of one run folder: found again by their tags, ended all together, none of them twice."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.protocol.events import Event, RunClosed
from pipeline.protocol.trial import Status
from pipeline.recording import mlflow_entities as entities

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "pipeline.run"
TRIAL_TAG = "pipeline.trial"
ERROR_TAG = "error"
"""Tag with the first error of a run that failed."""


def experiment_id(client: "MlflowClient", name: str, *, root: str | None) -> str:
    """The id of an MLflow experiment, created unless it exists with ``root`` for its artifacts."""
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=root))
    except MlflowException:
        if found := client.get_experiment_by_name(name):  # another run has created it meanwhile
            return str(found.experiment_id)
        raise


class TaggedRuns:
    """The MLflow runs that carry a run's name, one for each trial.

    Args:
        client: of the store.
        name: of the run, its folder's.
        experiment: MLflow's id of the experiment.
    """

    def __init__(self, client: "MlflowClient", *, name: str, experiment: str) -> None:
        self._client = client
        self._name = name
        self._experiment = experiment

    def open(self, event: Event, *, trial: str, title: str, tags: Mapping[str, str]) -> str:
        """Id of a trial's MLflow run, which is open now; created unless it exists."""
        if found := self._found({RUN_TAG: self._name, TRIAL_TAG: trial}):
            run = max(found, key=_content)
            self._client.update_run(run.info.run_id, status="RUNNING")
            if ERROR_TAG in run.data.tags:  # it goes on: that is over
                self._client.delete_tag(run.info.run_id, ERROR_TAG)
            return str(run.info.run_id)
        given = entities.tags({**tags, RUN_TAG: self._name, TRIAL_TAG: trial})
        time = entities.milliseconds(event)
        run = self._client.create_run(self._experiment, time, {tag.key: tag.value for tag in given}, title)
        return str(run.info.run_id)

    def of(self, name: str, *, trial: str) -> str:
        """Id of another run's MLflow run, such as that of the sweep which this one is a trial of.

        Raises:
            LookupError: MLflow doesn't have it, or not yet.
        """
        if not (found := self._found({RUN_TAG: name, TRIAL_TAG: trial})):
            raise LookupError(f"{name} isn't in MLflow yet; pipeline sync sends it")
        return str(max(found, key=_content).info.run_id)

    def end(self, run_id: str, event: Event, *, status: Status) -> None:
        """End one run."""
        self._client.set_terminated(run_id, status=status, end_time=entities.milliseconds(event))

    def end_all(self, event: RunClosed) -> None:
        """Leave no run open, and none twice.

        A server may create a run and its answer get lost: that run is then empty, beside the one that is used.
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
    """How much has been written to a run besides its tags."""
    return len(run.data.params) + len(run.data.metrics)
