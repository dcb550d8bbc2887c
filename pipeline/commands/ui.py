"""``pipeline ui``: MLflow's own UI on a tracking store."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import say
from pipeline.tracking.store import resolve_uri
from pipeline.tracking.ui import pages, serve


def ui(
    store: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", metavar="URI", help="Tracking server or database to show.")
    ] = "sqlite:///mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Port on localhost.")] = 5000,
) -> None:
    """Serve the MLflow UI with the results on localhost."""
    serve(resolve_uri(store, base=Path.cwd()), port=port, ready=_print_links)


def _print_links(address: str) -> None:
    """Print a link to the runs of each experiment, since MLflow opens with its pages for GenAI."""
    try:
        links = [f"{experiment}: {link}" for experiment, link in pages(address)]
    except (OSError, ValueError) as error:  # a server that asks for a password, or one that isn't MLflow
        links = [f"The experiments cannot be listed: {error}"]
    say("\n".join([f"MLflow UI: {address}", *links]))
