"""What MLflow's page of a logged model says: what the model is, how to load it, its signature and its figures.

Of these MLflow shows by itself only a file among others that has the signature.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.uris import without_credentials

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric, Run
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

_NOTE_TAG = "mlflow.note.content"
_REACHED = "validation/"


def describe(client: "MlflowClient", logged: "LoggedModel", *, path: Path, example: "torch.Tensor") -> None:
    """Fill the page; the same again changes nothing.

    Args:
        client: of the store.
        logged: the model, whose files are there by now.
        path: folder with the model's files.
        example: a small batch of its inputs.

    Raises:
        Exception: whatever MLflow's store raises.
    """
    from mlflow.models import Model

    run = client.get_run(logged.source_run_id)
    client.log_batch(run.info.run_id, metrics=list(_figures(client, run, logged)), synchronous=True)
    uri = without_credentials(client.tracking_uri)
    parts = [_what(run, path), _code(logged, uri=uri, example=example), _signature(Model.load(path).signature)]
    client.set_logged_model_tags(logged.model_id, {_NOTE_TAG: "\n\n".join(filter(None, parts))})


def _figures(client: "MlflowClient", run: "Run", logged: "LoggedModel") -> "Iterator[Metric]":
    """What the run has reached in the end, as figures of the model; of equal points the run keeps one."""
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


def _signature(signature: "ModelSignature | None") -> str:
    """Inputs and outputs as a table; -1 is a size of any length."""
    if signature is None:
        return ""
    schemas = {"input": signature.inputs, "output": signature.outputs}
    rows = [row for side, schema in schemas.items() if schema is not None for row in _rows(side, schema)]
    return "\n".join(["| signature | type | shape |", "|---|---|---|", *rows])


def _rows(side: str, schema: "Schema") -> Iterator[str]:
    for tensor in schema.inputs:
        name = f"{side} {tensor.name}" if tensor.name else side
        yield f"| {name} | {tensor.type} | {tensor.shape} |"
