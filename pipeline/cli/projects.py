"""Commands for writing experiments: projects of them, and their schema."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import completion
from pipeline.errors import UsageError


def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from pipeline.config.load import experiment_json_schema

    typer.echo(json.dumps(experiment_json_schema(), indent=2))


def new(
    template: Annotated[
        str | None,
        typer.Argument(help="ddp-project or dp-prototype.", show_default=False, autocompletion=completion.templates),
    ] = None,
    directory: Annotated[Path | None, typer.Argument(help="Folder of the new project.", show_default=False)] = None,
    *,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Answer a question.")] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask nothing: take the defaults for the rest.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Merge template changes into this folder's project.")
    ] = False,
) -> None:
    """Create a project from a template, or update one."""
    from pipeline.commands.new import show

    if update:
        if template is not None:
            raise UsageError(f"--update works on the project in the working directory; leave out {template}")
        raise typer.Exit(show.update(Path.cwd(), settings or [], say=typer.echo))
    show.create(template, directory, settings or [], no_input=no_input, say=typer.echo)
