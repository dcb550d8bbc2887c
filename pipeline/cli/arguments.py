"""Arguments that several commands take, and how they end."""

import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import completion
from pipeline.errors import ExperimentError, Interrupted, PipelineError, Terminated, UsageError
from pipeline.system import allocator
from pipeline.system.imports import undisturbed

if TYPE_CHECKING:
    from pipeline.config.load import ExperimentFile

FileArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="The experiment, a YAML file.", show_default=False, autocompletion=completion.files
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, e.g. train.epochs=2.",
        show_default=False,
        autocompletion=completion.overrides,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Join this Ray cluster: parallel.address, and launcher ray."),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[RUN]",
        help="Go on with an interrupted run: the newest one of this experiment, or RUN.",
        autocompletion=completion.runs,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Let the workers' and Ray's output through.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, all else on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only, and warnings on stderr.")]


class Scaling(StrEnum):
    """What stays the same when workers are added."""

    strong = "strong"
    weak = "weak"
    both = "both"


def with_address(overrides: Sequence[str] | None, address: str | None) -> list[str]:
    """The overrides, and those that ``--address`` stands for; it counts as written last."""
    joining = [f"parallel.address={json.dumps(address)}", "parallel.launcher=ray"] if address is not None else []
    return [*(overrides or ()), *joining]


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM as errors with their exit codes."""
    try:
        yield
    except Terminated:
        raise Interrupted("terminated by SIGTERM", exit_code=143) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


@contextmanager
def head_start(file: "ExperimentFile", *, verbose: bool, tracked: bool) -> Iterator[None]:
    """Start what the experiment will need, interruptibly; an error is shown before that is ended.

    Args:
        file: the experiment.
        verbose: whether to let the launcher's and the workers' output through to the terminal.
        tracked: whether MLflow will get the results.
    """
    from pipeline.launchers import _head_start
    from pipeline.recording import mlflow

    with interruptible(), ExitStack() as begun:
        begun.enter_context(allocator.huge_pages())
        begun.enter_context(_head_start.given(file.experiment, verbose=verbose))
        if tracked:
            begun.enter_context(mlflow.head_start(file.experiment.tracking.uri))
        try:
            with undisturbed():
                importlib.import_module("pipeline.commands.run")  # and torch with it
            yield
        except PipelineError as error:
            show(error)
            raise typer.Exit(error.exit_code) from None


def show(error: PipelineError) -> None:
    """An error as a user sees it: what went wrong, and of training the failed rank's own traceback."""
    typer.echo(error.told, err=True)


def problems_of(error: PipelineError | None) -> list[dict[str, str]]:
    """An error for programs: where, which key, what; nothing for none."""
    if isinstance(error, ExperimentError):
        return [problem._asdict() for problem in error.problems]
    return [] if error is None else [{"key": "", "message": str(error), "place": ""}]


def strategies_of(text: str) -> tuple[str, ...]:
    """The strategies of a list such as "single,ddp"."""
    from pipeline import registry
    from pipeline.wording import did_you_mean

    known = registry.names("strategies")
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"--strategies {text}: no strategy is called {name!r}{hint}")
    return names


def counts_of(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as "1,2,4"."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and int(part) > 0):
            raise UsageError(
                f"{option} {text}: {part!r} is not a number of workers; write numbers from 1 on, e.g. 1,2,4"
            )
    return tuple(dict.fromkeys(map(int, parts)))
