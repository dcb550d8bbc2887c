"""Logging of the trained model to MLflow, with signature and description."""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.experiment.uris import without_credentials
from pipeline.protocol.events import ModelExported, ModelSaved
from pipeline.tracking.mlflow.mlflow_runs import RUN_TAG
from pipeline.tracking.mlflow.model_folder import PROGRAM, first_line, source

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    from pipeline.tracking.mlflow.model_folder import Array, Arrays

_NAME = "model"  # of a run without an experiment's name
_FORBIDDEN = re.compile(r"[/:.%\"']")
_NOTE_TAG = "mlflow.note.content"
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
    """Log the model of a run once: in torch.export's format, or as pickle if the export fails.

    A model that can't be rebuilt or saved is a warning; its weights are an artifact of the run in any case.

    Returns:
        True if MLflow has the model.

    Raises:
        Exception: whatever MLflow's store raises; the call may be repeated.
    """
    logged = logged_model(client, run_id)
    is_logged = logged is not None and logged.status.value == "READY"
    is_logged = is_logged or _log_model(client, saved, exported, logged=logged, run_id=run_id, folder=folder, warn=warn)
    if exported is not None:
        (folder / exported.program).unlink(missing_ok=True)
    return is_logged


def _log_model(
    client: "MlflowClient",
    saved: ModelSaved,
    exported: ModelExported | None,
    *,
    logged: "LoggedModel | None",
    run_id: str,
    folder: Path,
    warn: Callable[[str], None],
) -> bool:
    """Log the model; return False after a warning."""
    from mlflow.models import Model

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        try:
            found = source(saved, exported, folder=folder)
        except PipelineError as error:
            warn(f"the model isn't logged to MLflow. {error}")
            return False
        except Exception as error:  # noqa: BLE001 - user code; the run itself is fine
            _log.warning("the model can't be rebuilt", exc_info=error)
            warn(f"the model isn't logged to MLflow, because it can't be rebuilt: {first_line(error)}")
            return False
        logged = logged or _create(client, run_id)
        identity = {"run_id": logged.source_run_id, "model_id": logged.model_id, "model_uuid": logged.model_id}
        model = Model(artifact_path=logged.artifact_location, **identity)
        try:
            with warnings.catch_warnings(action="ignore"):  # of torch.export and MLflow; nothing a user can act on
                found.write(path, model=model, warn=warn)
        except Exception as error:  # noqa: BLE001 - user code and torch.export; the run itself is fine
            _log.warning("the model can't be saved", exc_info=error)
            warn(f"the model isn't logged to MLflow, because it can't be saved: {first_line(error)}")
            client.finalize_logged_model(logged.model_id, "FAILED")
            return False
        client.log_model_artifacts(logged.model_id, str(path))
        _describe(client, logged, path=path, inputs=found.inputs, step=saved.step)
    client.finalize_logged_model(logged.model_id, "READY")
    return True


def logged_model(client: "MlflowClient", run_id: str) -> "LoggedModel | None":
    """Return the logged model of a run, which may be incomplete; None without one."""
    run = client.get_run(run_id)
    outputs = run.outputs.model_outputs if run.outputs else []
    return client.get_logged_model(outputs[-1].model_id) if outputs else None


def _create(client: "MlflowClient", run_id: str) -> "LoggedModel":
    """Create a logged model and link it to its run first, so that a second attempt finds it."""
    from mlflow.entities import LoggedModelOutput

    run = client.get_run(run_id)
    name = _FORBIDDEN.sub("_", run.data.params.get("name", _NAME))
    logged = client.create_logged_model(run.info.experiment_id, name, run_id, params=run.data.params)
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return logged


def _describe(client: "MlflowClient", logged: "LoggedModel", *, path: Path, inputs: "Arrays", step: int | None) -> None:
    """Write the description on the model's page in MLflow: origin, code to load it, signature, metrics. Idempotent.

    Args:
        client: client of the store.
        logged: the logged model, with its files uploaded.
        path: local folder of the model's files.
        inputs: a small batch of its inputs.
        step: step of the weights; None for the last.

    Raises:
        Exception: whatever MLflow's store raises.
    """
    from mlflow.models import Model

    run = client.get_run(logged.source_run_id)
    client.log_batch(run.info.run_id, metrics=list(_figures(client, run, logged, step=step)), synchronous=True)
    uri = without_credentials(client.tracking_uri)
    parts = [_what(run, path, step=step), _code(logged, uri=uri, inputs=inputs), _table(Model.load(path).signature)]
    client.set_logged_model_tags(logged.model_id, {_NOTE_TAG: "\n\n".join(filter(None, parts))})


def _figures(client: "MlflowClient", run: "Run", logged: "LoggedModel", *, step: int | None) -> "Iterator[Metric]":
    """Yield the run's validation and test metrics at a step, by default the last, as metrics of the model."""
    from mlflow.entities import Metric

    for name in run.data.metrics:
        if name.startswith(_REACHED):
            history = client.get_metric_history(run.info.run_id, name)
            known = [point for point in history if step is None or point.step <= step] or history
            last = max(known, key=lambda point: (point.step, point.timestamp))
            yield Metric(name, last.value, last.timestamp, last.step, model_id=logged.model_id)


def _what(run: "Run", path: Path, *, step: int | None) -> str:
    at = "" if step is None else f", with the best weights (step {step:,})"
    source = f"`{run.data.params.get('model._target_', 'The model')}`, trained by run {run.data.tags[RUN_TAG]}{at}."
    if (path / PROGRAM).exists():
        return f"{source} Exported by torch.export."
    return f"{source} A pickle. Loading it runs code and needs the packages of the training."


def _code(logged: "LoggedModel", *, uri: str, inputs: "Arrays") -> str:
    if isinstance(inputs, Mapping):
        given = "\n".join(f"    {name}={_zeros(array)}," for name, array in inputs.items())
        call = f"model(\n{given}\n)"
    else:
        call = f"model({_zeros(inputs)})"
    return f"""```python
import mlflow, torch

mlflow.set_tracking_uri("{uri}")
model = mlflow.pytorch.load_model("{logged.model_uri}")
{call}
```"""


def _zeros(array: "Array") -> str:
    shape = ", ".join(map(str, array.shape))
    return f"torch.zeros({shape}, dtype=torch.{array.dtype})"


def _table(signature: "ModelSignature | None") -> str:
    """Format inputs and outputs as a Markdown table; -1 is a dimension of any size."""
    if signature is None:
        return ""
    schemas = {"input": signature.inputs, "output": signature.outputs}
    rows = [row for side, schema in schemas.items() if schema is not None for row in _rows(side, schema)]
    return "\n".join(["| signature | type | shape |", "|---|---|---|", *rows])


def _rows(side: str, schema: "Schema") -> Iterator[str]:
    for tensor in schema.inputs:
        name = f"{side} {tensor.name}" if tensor.name else side
        yield f"| {name} | {tensor.type} | {tensor.shape} |"
