"""``tracking.register_model``: the logged model of a run as a version in MLflow's registry, made once."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.protocol.events import ModelSaved
from pipeline.tracking.mlflow.model import logged_model

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ALIAS_TAG = "pipeline.alias"
"""Tag of a version with the alias that it was given: sending a run again doesn't take it from a later version."""


def register(client: "MlflowClient", saved: ModelSaved, *, run_id: str, warn: Callable[[str], None]) -> None:
    """Make a run's logged model a version of a registered model, and give it its alias, each unless it was done.

    A model that couldn't be logged is a warning.

    Raises:
        Exception: whatever MLflow's store raises; the call may be repeated.
    """
    name = saved.registered
    logged = logged_model(client, run_id)
    if logged is None or logged.status.value != "READY":
        warn(f"tracking.register_model: {name} gets no version, because the model isn't logged to MLflow")
        return
    version = _version(client, name, run_id=run_id)
    if version is None:
        _create(client, name)
        # The place of its files, since MLflow looks a model's own URI up in the global store, which may be another one.
        place, model_id = logged.artifact_location, logged.model_id
        version = client.create_model_version(name, place, run_id=run_id, model_id=model_id, await_creation_for=0)
    if saved.alias and version.tags.get(ALIAS_TAG) != saved.alias:
        client.set_registered_model_alias(name, saved.alias, version.version)
        client.set_model_version_tag(name, version.version, ALIAS_TAG, saved.alias)


def _version(client: "MlflowClient", name: str, *, run_id: str) -> "ModelVersion | None":
    """Return the version that an earlier attempt made of the run's model, if any."""
    there = client.search_model_versions(f"run_id = '{run_id}'")
    return next((version for version in there if version.name == name), None)


def _create(client: "MlflowClient", name: str) -> None:
    """Create the registered model unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
