"""The trained model in MLflow: its folder, which rank 0 has written, with a description, and its registered version."""

import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.experiment.uris import without_credentials
from pipeline.protocol.events import ModelExported, ModelSaved
from pipeline.wording import first_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

RUN_TAG = "pipeline.run"
ALIAS_TAG = "pipeline.alias"
"""Tag of a version with the alias that it was given: sending a run again doesn't take it from a later version."""
_FORBIDDEN = re.compile(r"[/:.%\"']")
_NOTE_TAG = "mlflow.note.content"
_PROGRAM = Path("data", "model.pt2")  # where MLflow keeps an exported program
_REACHED = ("validation/", "test/")
_log = logging.getLogger(__name__)


def log_model(
    client: "MlflowClient",
    saved: ModelSaved,
    exported: ModelExported | None,
    *,
    run_id: str,
    folder: Path,
    warn: Callable[[str], None],
) -> bool:
    """Log a run's model once, as rank 0 has written it or built again; return False after a warning."""
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model
    from mlflow.models.model import MLMODEL_FILE_NAME

    logged = logged_model(client, run_id)
    done = logged is not None and logged.status.value == "READY"
    written = folder / exported.program if exported is not None else None
    if not done:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "model"
            if written is not None and (written / MLMODEL_FILE_NAME).exists():
                shutil.copytree(written, path)  # the ids in it are those of one store
            elif not _write(folder, path, warn=warn):
                return False
            if logged is None:  # linked to its run first, so that a second attempt finds it
                run = client.get_run(run_id)
                name = _FORBIDDEN.sub("_", run.data.params.get("name", "model"))
                logged = client.create_logged_model(run.info.experiment_id, name, run_id, params=run.data.params)
                client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
            model = Model.load(path)
            model.artifact_path, model.run_id = logged.artifact_location, logged.source_run_id
            model.model_id = model.model_uuid = logged.model_id
            model.save(path / MLMODEL_FILE_NAME)
            client.log_model_artifacts(logged.model_id, str(path))
            _describe(client, logged, path=path, step=saved.step)
        client.finalize_logged_model(logged.model_id, "READY")
    if written is not None:
        shutil.rmtree(written, ignore_errors=True)
    return True


def _write(folder: Path, path: Path, *, warn: Callable[[str], None]) -> bool:
    """Build the model again from its weights and write MLflow's folder of it; return False after a warning."""
    try:
        from pipeline.experiment.load import load
        from pipeline.experiment.targets import allowed_packages
        from pipeline.train.exported import write_mlflow_model

        experiment = load(folder / "experiment.yaml").experiment
        write_mlflow_model(experiment, path, folder=folder, allowed=allowed_packages(), warn=warn)
    except PipelineError as error:
        warn(f"the model isn't logged to MLflow. {error}")
    except Exception as error:  # noqa: BLE001 - user code; the run itself is fine
        _log.warning("the model can't be saved", exc_info=error)
        warn(f"the model isn't logged to MLflow: {type(error).__name__}: {first_line(error)}")
    else:
        return True
    return False


def logged_model(client: "MlflowClient", run_id: str) -> "LoggedModel | None":
    """Return the logged model of a run, which may be incomplete; None without one."""
    run = client.get_run(run_id)
    outputs = run.outputs.model_outputs if run.outputs else []
    return client.get_logged_model(outputs[-1].model_id) if outputs else None


def _describe(client: "MlflowClient", logged: "LoggedModel", *, path: Path, step: int | None) -> None:
    """Give the model its metrics at ``step``, by default the last, and a text: its origin, and how to load it."""
    from mlflow.entities import Metric

    run, metrics = client.get_run(logged.source_run_id), list[Metric]()
    for name in run.data.metrics:
        if name.startswith(_REACHED):
            history = client.get_metric_history(run.info.run_id, name)
            known = [point for point in history if step is None or point.step <= step] or history
            last = max(known, key=lambda point: (point.step, point.timestamp))
            metrics.append(Metric(name, last.value, last.timestamp, last.step, model_id=logged.model_id))
    client.log_batch(run.info.run_id, metrics=metrics, synchronous=True)
    at = "" if step is None else f", with the best weights (step {step:,})"
    kind = "A pickle. Loading it runs code and needs the packages of the training."
    if (path / _PROGRAM).exists():
        kind = "Exported by torch.export."
    origin = f"`{run.data.params.get('model._target_', 'The model')}`, trained by run {run.data.tags[RUN_TAG]}{at}."
    note = f"""{origin} {kind}

```python
import mlflow

mlflow.set_tracking_uri("{without_credentials(client.tracking_uri)}")
model = mlflow.pytorch.load_model("{logged.model_uri}")
```"""
    client.set_logged_model_tags(logged.model_id, {_NOTE_TAG: note})


def register(client: "MlflowClient", saved: ModelSaved, *, run_id: str, warn: Callable[[str], None]) -> None:
    """Make a run's logged model a version of a registered model, and give it its alias, each unless it was done."""
    from mlflow.exceptions import MlflowException

    name, logged = saved.registered, logged_model(client, run_id)
    if logged is None or logged.status.value != "READY":
        warn(f"tracking.register_model: {name} gets no version, because the model isn't logged to MLflow")
        return
    there = client.search_model_versions(f"run_id = '{run_id}'")
    version = next((version for version in there if version.name == name), None)
    if version is None:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # The place of its files, since MLflow looks a model's own URI up in the global store, which may be another one.
        place, model_id = logged.artifact_location, logged.model_id
        version = client.create_model_version(name, place, run_id=run_id, model_id=model_id, await_creation_for=0)
    if saved.alias and version.tags.get(ALIAS_TAG) != saved.alias:
        client.set_registered_model_alias(name, saved.alias, version.version)
        client.set_model_version_tag(name, version.version, ALIAS_TAG, saved.alias)
