"""Logging of the trained model to MLflow, with signature and description; rebuilt from the run's folder."""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config.schema import Experiment
from pipeline.config.uris import without_credentials
from pipeline.protocol.events import ModelSaved

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.models import ModelSignature
    from mlflow.types import Schema
    from torch import nn

NAME = "model"
_NOTE_TAG = "mlflow.note.content"
_REACHED = "validation/"
_log = logging.getLogger(__name__)


def log_model(
    client: "MlflowClient", event: ModelSaved, *, run_id: str, folder: Path, warn: Callable[[str], None]
) -> None:
    """Log the model of a run once: in torch.export's format, or as pickle if the export fails.

    A model that can't be rebuilt or saved is a warning; its weights are an artifact of the run in any case.

    Raises:
        Exception: whatever MLflow's store raises; the call may be repeated.
    """
    logged = _logged(client, run_id)
    if logged is not None and logged.status.value == "READY":
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / NAME
        try:
            module, example = rebuild(event, folder=folder)
        except Exception as error:  # noqa: BLE001 - user code; the run itself is fine
            _log.warning("the model can't be rebuilt", exc_info=error)
            warn(f"the model isn't logged to MLflow, it can't be rebuilt: {_first_line(error)}")
            return
        logged = logged or _create(client, run_id)
        try:
            _save(module, example, path=path, logged=logged, warn=warn)
        except Exception as error:  # noqa: BLE001 - user code and torch.export; the run itself is fine
            _log.warning("the model can't be saved", exc_info=error)
            warn(f"the model isn't logged to MLflow, it can't be saved: {_first_line(error)}")
            client.finalize_logged_model(logged.model_id, "FAILED")
            return
        client.log_model_artifacts(logged.model_id, str(path))
        _describe(client, logged, path=path, example=example)
    client.finalize_logged_model(logged.model_id, "READY")


def rebuild(event: ModelSaved, *, folder: Path) -> "tuple[nn.Module, torch.Tensor]":
    """Return the trained module in evaluation mode, on the CPU, and a small batch of its inputs.

    Raises:
        ExperimentError: the model's component can't be built in this process.
        RuntimeError: the weights belong to another model.
    """
    import torch

    from pipeline.config.components import build
    from pipeline.config.targets import allowed_packages

    experiment = Experiment.model_validate(yaml.safe_load((folder / "experiment.yaml").read_text()))
    module: nn.Module = build(experiment.model, key="model", allowed=allowed_packages(), runtime={})
    weights: Mapping[str, torch.Tensor] = torch.load(folder / event.weights, map_location="cpu", weights_only=True)
    example: torch.Tensor = torch.load(folder / event.example, map_location="cpu", weights_only=True)
    precision = next((value.dtype for value in weights.values() if value.is_floating_point()), None)
    module.to(device="cpu", dtype=precision).load_state_dict(weights)
    return module.eval(), example


def _logged(client: "MlflowClient", run_id: str) -> "LoggedModel | None":
    """Return the model that an earlier attempt created, if any."""
    run = client.get_run(run_id)
    outputs = run.outputs.model_outputs if run.outputs else []
    return client.get_logged_model(outputs[-1].model_id) if outputs else None


def _create(client: "MlflowClient", run_id: str) -> "LoggedModel":
    """Create a logged model and link it to its run first, so that a second attempt finds it."""
    from mlflow.entities import LoggedModelOutput

    run = client.get_run(run_id)
    logged = client.create_logged_model(run.info.experiment_id, NAME, run_id, params=run.data.params)
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return logged


def _save(
    module: "nn.Module", example: "torch.Tensor", *, path: Path, logged: "LoggedModel", warn: Callable[[str], None]
) -> None:
    """Write an MLflow model folder: as an exported program, which runs no code when loaded, else as pickle."""
    import mlflow.pytorch
    from mlflow.models import Model

    identity = {"run_id": logged.source_run_id, "model_id": logged.model_id, "model_uuid": logged.model_id}

    def save(serialization_format: str) -> None:
        mlflow.pytorch.save_model(
            module,
            path,
            mlflow_model=Model(artifact_path=logged.artifact_location, **identity),
            signature=_signature(module, example),
            input_example=example.numpy(),
            serialization_format=serialization_format,
            # Given: MLflow would start a process that loads the model to infer it.
            pip_requirements=mlflow.pytorch.get_default_pip_requirements(),
        )

    with warnings.catch_warnings():  # of torch.export and MLflow; nothing that a user can act on
        warnings.simplefilter("ignore")
        try:
            save("pt2")
        except Exception as error:  # noqa: BLE001 - whatever torch.export can't trace in a user's model
            _log.warning("torch.export failed", exc_info=error)
            warn(f"the model is logged as pickle, since torch.export failed: {_first_line(error)}")
            shutil.rmtree(path, ignore_errors=True)
            save("pickle")


def _signature(module: "nn.Module", example: "torch.Tensor") -> "ModelSignature":
    """Infer names, types and shapes of inputs and outputs; outputs other than tensors have no signature."""
    import torch
    from mlflow.models import infer_signature

    with torch.no_grad():
        output: Any = module(example)
    if isinstance(output, Mapping):
        output = {name: value.numpy() for name, value in output.items() if isinstance(value, torch.Tensor)}
    elif isinstance(output, torch.Tensor):
        output = output.numpy()
    else:
        output = None
    return infer_signature(example.numpy(), output)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _describe(client: "MlflowClient", logged: "LoggedModel", *, path: Path, example: "torch.Tensor") -> None:
    """Write the description on the model's page in MLflow: origin, code to load it, signature, metrics. Idempotent.

    Args:
        client: client of the store.
        logged: the logged model, with its files uploaded.
        path: local folder of the model's files.
        example: a small batch of its inputs.

    Raises:
        Exception: whatever MLflow's store raises.
    """
    from mlflow.models import Model

    run = client.get_run(logged.source_run_id)
    client.log_batch(run.info.run_id, metrics=list(_figures(client, run, logged)), synchronous=True)
    uri = without_credentials(client.tracking_uri)
    parts = [_what(run, path), _code(logged, uri=uri, example=example), _table(Model.load(path).signature)]
    client.set_logged_model_tags(logged.model_id, {_NOTE_TAG: "\n\n".join(filter(None, parts))})


def _figures(client: "MlflowClient", run: "Run", logged: "LoggedModel") -> "Iterator[Metric]":
    """Yield the last validation metrics of the run as metrics of the model."""
    from mlflow.entities import Metric

    for name in run.data.metrics:
        if name.startswith(_REACHED):
            last = max(
                client.get_metric_history(run.info.run_id, name), key=lambda point: (point.step, point.timestamp)
            )
            yield Metric(name, last.value, last.timestamp, last.step, model_id=logged.model_id)


def _what(run: "Run", path: Path) -> str:
    source = f"`{run.data.params.get('model._target_', 'The model')}`, trained by {run.info.run_name}."
    if (path / "data" / "model.pt2").exists():
        return f"{source} An exported program of torch.export."
    return f"{source} A pickle: loading it runs code, and needs the packages that it was trained with."


def _code(logged: "LoggedModel", *, uri: str, example: "torch.Tensor") -> str:
    shape = ", ".join(map(str, example.shape))
    return f"""```python
import mlflow, torch

mlflow.set_tracking_uri("{uri}")
model = mlflow.pytorch.load_model("{logged.model_uri}")
model(torch.zeros({shape}, dtype={example.dtype}))
```"""


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
