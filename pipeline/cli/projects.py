"""Commands that train nothing: ``check``, ``doctor``, ``schema`` and ``new``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.arguments import Json, problems_of, show
from pipeline.errors import PipelineError, UsageError
from pipeline.experiment.targets import lacking
from pipeline.system import end_stage


def check(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [KEY=VALUE]...", help="Experiment files; values for all.", show_default=False),
    ],
    *,
    data: Annotated[
        bool,
        typer.Option(help="Also load the data and try a batch. Use --no-data on a machine without the data."),
    ] = True,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only problems.")] = False,
) -> None:
    """Check experiment files without training: each component, the data, and one batch."""
    import rich.console

    from pipeline.commands.check import iter_checks
    from pipeline.record.console import progress_on, stages_on

    errors: dict[str, PipelineError] = {}
    overrides = [word for word in files if "=" in word and not Path(word).exists()]
    files = [word for word in files if word not in overrides]
    if not files:
        raise UsageError(f"name an experiment file, too: pipeline check FILE {overrides[0]}")
    console = rich.console.Console(highlight=False, stderr=True, quiet=quiet)
    with stages_on(rich.console.Console(quiet=True) if as_json else console):
        for file, check_file in iter_checks(files, overrides, with_data=data):
            with progress_on(console):
                found = check_file()
            end_stage()
            if found.error is not None:
                show(found.error)
                errors[file] = found.error
            elif not quiet:
                typer.echo(f"{file}: ok{f'; {found.sweep}' if found.sweep else ''}", err=as_json)
                if found.skipped:
                    typer.echo(f"  No batch was tried. {found.skipped}", err=as_json)
    if as_json:
        typer.echo(json.dumps([{"file": file, "problems": problems_of(errors.get(file))} for file in files], indent=2))
    if errors:
        raise typer.Exit(next(iter(errors.values())).exit_code)


def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from pipeline.experiment.jsonschema import experiment_json_schema

    typer.echo(json.dumps(experiment_json_schema(), indent=2))


def new(
    template: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEMPLATE]",
            help="Template: ddp-project or dp-prototype.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder of the new project.", show_default=False)
    ] = None,
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Answer to a question of the template.")
    ] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask no questions; answer with the defaults.")] = False,
) -> None:
    """Create a project from a template."""
    if missing := lacking("pipeline new", "cookiecutter"):
        raise UsageError(missing)
    from pipeline.commands.new.create import create

    created = create(template, directory, settings or [], no_input=no_input)
    if created.warning:
        typer.echo(f"note: no first commit: {created.warning}")
    typer.echo(created.next_commands)


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Experiment file. Its tracking server and its cluster are also checked.",
            show_default=False,
        ),
    ] = None,
    *,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Ray cluster to check. Default: the cluster of FILE, or RAY_ADDRESS."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine or a cluster, and print each problem with its fix."""
    import rich.console

    from pipeline.commands.doctor.examination import examine, show
    from pipeline.experiment.load import load
    from pipeline.experiment.schema import Parallel

    experiment = load(file).experiment if file is not None else None
    parallel = experiment.parallel if experiment else Parallel(launcher="ray")
    if address is not None:
        parallel = parallel.model_copy(update={"launcher": "ray", "address": address})
    uri = experiment.tracking.uri if experiment else None
    examination = examine(parallel, uri=uri, say=lambda what: typer.echo(what, err=True))
    if as_json:
        typer.echo(examination.model_dump_json(indent=2))
    else:
        show(examination, terminal=rich.console.Console(highlight=False))
    if examination.problems:
        raise typer.Exit(3)
