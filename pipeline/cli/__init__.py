"""The command ``pipeline``: parse and print, nothing else.

Commands import what they need when they run, so that ``--help`` answers at once and doesn't load torch.
"""

import platform
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pipeline.cli import completion, diagnosis, experiments, jobs, projects, results, sweeps
from pipeline.cli.arguments import show
from pipeline.errors import PipelineError, Terminated
from pipeline.system.imports import importable

_DISTRIBUTION = "ddp-pipeline"
_SHOWN = ("torch", "ray", "mlflow")


def _show_versions(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    typer.echo(f"pipeline {installed(_DISTRIBUTION)}{_checkout()}")
    typer.echo(f"python {platform.python_version()}")
    for name in _SHOWN:
        typer.echo(f"{name} {installed(name)}")
    raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Declarative experiments for data-parallel PyTorch training, with measured speedups."""


def _checkout() -> str:
    """The commit that this code is of, if it lies in a checkout of its own; nothing for an installed one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return ""
    from pipeline.recording.provenance import git

    commit = git("rev-parse", "--short=12", "HEAD", folder=root)
    changed = git("status", "--porcelain", "--untracked-files=no", folder=root)
    return f" (commit {commit}{', with changes' if changed else ''})" if commit else ""


app = typer.Typer(
    help="Declarative experiments for data-parallel PyTorch training, with measured speedups.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(_options)
app.command()(experiments.run)
app.command()(experiments.compare)
app.command()(sweeps.sweep)
app.command("tune-batch")(experiments.tune_batch)
app.command()(experiments.predict)
app.command()(experiments.check)
app.command()(jobs.submit)
app.command()(jobs.status)
app.command()(jobs.logs)
app.command()(jobs.stop)
app.command()(diagnosis.doctor)
app.command("list")(results.list_)
app.command()(results.show)
app.command()(results.diff)
app.command()(results.ui)
app.command()(results.sync)
app.command()(projects.schema)
app.command()(projects.new)


def main() -> NoReturn:
    """Entry point. Errors that are the user's to mend are shown without a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    if completion.is_asked_for(sys.argv[1:]):
        completion.without_space_after_equals()
    try:
        with importable(Path.cwd()):
            app(args=_with_latest(sys.argv[1:]), prog_name="pipeline")
    except PipelineError as error:
        show(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def _with_latest(arguments: list[str]) -> list[str]:
    """``--resume`` may stand alone, which its option can't; an override or another option is no run."""
    following = [*arguments[1:], "--"]
    return [
        "--resume=latest" if word == "--resume" and (next_.startswith("-") or "=" in next_) else word
        for word, next_ in zip(arguments, following, strict=False)
    ]


def _terminate(*_: object) -> NoReturn:
    raise Terminated
