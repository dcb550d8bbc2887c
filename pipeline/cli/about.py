"""``pipeline --version``: what is installed, found out without importing it."""

import platform
from pathlib import Path
from typing import Annotated

import typer

DISTRIBUTION = "ddp-pipeline"
_SHOWN = ("torch", "ray", "mlflow")


def _show(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    typer.echo(f"pipeline {installed(DISTRIBUTION)}{_checkout()}")
    typer.echo(f"python {platform.python_version()}")
    for name in _SHOWN:
        typer.echo(f"{name} {installed(name)}")
    raise typer.Exit


def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show, is_eager=True, help="Show versions and exit.")
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
