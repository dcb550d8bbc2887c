"""Commands for writing experiments: ``schema`` and ``new``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import completion
from pipeline.errors import UsageError


def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from pipeline.config.jsonschema import experiment_json_schema

    typer.echo(json.dumps(experiment_json_schema(), indent=2))


def new(
    template: Annotated[
        str | None,
        typer.Argument(
            help="Template: ddp-project or dp-prototype.", show_default=False, autocompletion=completion.templates
        ),
    ] = None,
    directory: Annotated[Path | None, typer.Argument(help="Folder of the new project.", show_default=False)] = None,
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Answer to a question of the template.")
    ] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask no questions; answer with the defaults.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Merge changes of the template into the project in this folder.")
    ] = False,
) -> None:
    """Create a project from a template, or update an existing project."""
    if update:
        if template is not None:
            raise UsageError(f"--update works on the project in the working directory; leave out {template}")
        _update(settings or [])
    else:
        _create(template, directory, settings or [], no_input=no_input)


def _create(template: str | None, directory: Path | None, settings: list[str], *, no_input: bool) -> None:
    from pipeline.commands.new.create import create

    created = create(template, directory, settings, no_input=no_input)
    if created.warning:
        typer.echo(f"note: no first commit: {created.warning}")
    typer.echo(created.next_commands)


def _update(settings: list[str]) -> None:
    """Update the project in the working directory; exit with 1 if there are conflicts."""
    from pipeline.commands.new.update import update

    updated = update(Path.cwd(), settings)
    if not updated.files:
        typer.echo("the template has not changed")
    for file in updated.files:
        typer.echo(f"{'conflict' if file in updated.conflicts else 'updated '}  {file}")
    if updated.conflicts:
        typer.echo("Resolve the conflicts, then git add and git commit; git merge --abort undoes the update.")
        raise typer.Exit(1)
