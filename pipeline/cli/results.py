"""Commands that look at results."""

from pathlib import Path
from typing import Annotated

import typer


def ui(
    store: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="The tracking store to show.")
    ] = "sqlite:///mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 5000,
) -> None:
    """Browse results in the MLflow UI, on loopback."""
    from pipeline.recording.store import resolve_uri
    from pipeline.recording.ui import serve

    serve(resolve_uri(store, base=Path.cwd()), port=port, ready=lambda address: typer.echo(f"MLflow UI: {address}"))


def sync(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, e.g. runs/<id>.", show_default=False)],
) -> None:
    """Send a run's journal to its tracking store, e.g. after the store was down; adds nothing twice."""
    from pipeline.recording.mlflow import sync as send

    outcome = send(folder, warn=lambda message: typer.echo(message, err=True))
    typer.echo(outcome.message)
    if not outcome.delivered:
        raise typer.Exit(3)
