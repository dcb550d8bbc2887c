"""The command ``pipeline``: its verbs, its entry point and ``--version``.

The modules of this folder parse arguments and print results, nothing else. Each command imports what it needs when it
runs, so that ``--help`` answers at once, without loading torch.
"""

import errno
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pipeline.cli import benchmark, comparison, experiments, projects, results, weights
from pipeline.cli.arguments import report_failure, show
from pipeline.cli.help import GROUPS, Command, Group, below
from pipeline.errors import PipelineError, UsageError, interrupt
from pipeline.system import hang_up, importable, missing_user_variables

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
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Declarative experiments for data-parallel PyTorch training, with measured speedups."""


def _checkout() -> str:
    """Return the commit of this code if it runs from a git checkout, or an empty text."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return ""
    from pipeline.record.provenance import git

    commit = git("rev-parse", "--short=12", "HEAD", folder=root)
    changed = git("status", "--porcelain", "--untracked-files=no", folder=root)
    return f" (commit {commit}{', with changes' if changed else ''})" if commit else ""


app = typer.Typer(
    cls=Group,
    help="Declarative experiments for data-parallel PyTorch training, with measured speedups.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(_options)
_VERBS: Mapping[str, Callable[..., None]] = {
    "run": experiments.run,
    "benchmark": benchmark.benchmark,
    "sweep": experiments.sweep,
    "evaluate": weights.evaluate,
    "export": weights.export,
    "list": results.list_,
    "show": results.show,
    "compare": comparison.compare,
    "ui": results.ui,
    "sync": results.sync,
    "remove": results.remove,
    "doctor": projects.doctor,
    "new": projects.new,
    "check": projects.check,
    "schema": projects.schema,
}
for _group, _commands in GROUPS.items():
    for _name, _examples in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_group, epilog=below(_examples))(_VERBS[_name])


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        _run()
    except SystemExit as end:
        if end.code == UsageError.exit_code:  # of an option that typer refuses, too
            report_failure(UsageError("its output has the error"))
        raise


def _run() -> NoReturn:
    """Run the command line; print an error that the user can fix without a traceback.

    Raises:
        SystemExit: always, unless there is an error of this project.
    """
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored, and stays so
        signal.signal(signal.SIGHUP, hang_up)
    os.environ.update(missing_user_variables())
    try:
        with importable(Path.cwd()):
            app(args=_with_latest(sys.argv[1:]), prog_name="pipeline")
    except PipelineError as error:
        show(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        show(UsageError(f"{str(error.filename)[:60]}...: this path is too long. Use a shorter path."))
        sys.exit(UsageError.exit_code)
    sys.exit(0)


def _with_latest(arguments: list[str]) -> list[str]:
    """Give ``--resume`` without a value the value ``latest``, since an option of typer can't have an optional value."""
    following = [*arguments[1:], "--"]
    return [
        "--resume=latest" if word == "--resume" and (next_.startswith("-") or "=" in next_) else word
        for word, next_ in zip(arguments, following, strict=False)
    ]
