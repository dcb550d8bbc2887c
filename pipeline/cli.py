"""The command ``pipeline``: parse and print, nothing else.

Commands import what they need when they run, so that ``--help`` answers at once and doesn't load torch.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pipeline.errors import Interrupted, PipelineError, Terminated, TrainingError, UsageError

app = typer.Typer(
    help="Declarative experiments for data-parallel PyTorch training, with measured speedups.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="The experiment, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. train.epochs=2.", show_default=False),
]


@app.command()
def run(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    baseline: Annotated[bool, typer.Option(help="Measure the baseline that the speedup is relative to.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Let the workers' and Ray's output through.")
    ] = False,
) -> None:
    """Run an experiment and report its speedup."""
    import rich.console

    from pipeline.config.load import load

    experiment = load(file, overrides or [])  # before torch is imported: a typo is answered at once
    from pipeline import runner

    if dry_run:
        typer.echo(runner.dry_run(experiment, with_baseline=baseline))
        return
    stdout = rich.console.Console(highlight=False)
    try:
        runner.run(experiment, with_baseline=baseline, verbose=verbose, stdout=stdout)
    except Terminated:
        raise Interrupted("terminated by SIGTERM", exit_code=143) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Experiments to check.", show_default=False)],
) -> None:
    """Check experiments and everything they name, and start nothing."""
    from pipeline import preflight
    from pipeline.config.load import load

    errors: list[PipelineError] = []
    for file in files:
        try:
            preflight.check(load(file))
        except PipelineError as error:
            _show(error)
            errors.append(error)
        else:
            typer.echo(f"{file}: ok")
    if errors:
        raise typer.Exit(errors[0].exit_code)


@app.command()
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


@app.command()
def sync(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, e.g. runs/<id>.", show_default=False)],
) -> None:
    """Send a run's journal to its tracking store, e.g. after the store was down; adds nothing twice."""
    from pipeline.recording.mlflow import sync as send

    outcome = send(folder, warn=lambda message: typer.echo(message, err=True))
    typer.echo(outcome.message)
    if not outcome.delivered:
        raise typer.Exit(3)


@app.command()
def schema() -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from pipeline.config.load import experiment_json_schema

    typer.echo(json.dumps(experiment_json_schema(), indent=2))


@app.command()
def new(
    template: Annotated[str | None, typer.Argument(help="ddp-project or dp-prototype.", show_default=False)] = None,
    directory: Annotated[Path | None, typer.Argument(help="Folder of the new project.", show_default=False)] = None,
    *,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Answer a question.")] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask nothing: take the defaults for the rest.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Merge template changes into this folder's project.")
    ] = False,
) -> None:
    """Create a project from a template, or update one."""
    from pipeline.scaffold import show

    if update:
        if template is not None:
            raise UsageError(f"--update works on the project in the working directory; leave out {template}")
        raise typer.Exit(show.update(Path.cwd(), settings or [], say=typer.echo))
    show.create(template, directory, settings or [], no_input=no_input, say=typer.echo)


def main() -> NoReturn:
    """Entry point. Errors that are the user's to mend are shown without a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    _make_importable(Path.cwd())
    try:
        app(prog_name="pipeline")
    except PipelineError as error:
        _show(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def _make_importable(folder: Path) -> None:
    """The project's own components, as for ``python -m``; here and in the processes that this one starts."""
    sys.path.insert(0, str(folder))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), inherited]))


def _show(error: PipelineError) -> None:
    if isinstance(error, TrainingError) and error.details:
        typer.echo(error.details.rstrip(), err=True)
    typer.echo(f"error: {error}" if "\n" not in str(error) else str(error), err=True)


def _terminate(*_: object) -> NoReturn:
    raise Terminated
