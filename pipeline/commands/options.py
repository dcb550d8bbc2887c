"""Arguments, consoles and messages that the commands share; torch is imported only by `head_start`."""

import importlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline import system
from pipeline.errors import Interrupted, PipelineError, Terminated, UsageError
from pipeline.plan.outer_launcher import is_follower
from pipeline.system import begin_stage, end_stage, redirect_to_null, undisturbed

if TYPE_CHECKING:
    from pipeline.experiment.load import ExperimentFile
    from pipeline.record.runs import RunSummary
    from pipeline.record.screen import Terminal

FileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Experiment file (YAML).", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override keys of the file, e.g. train.epochs=2.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Run on this Ray cluster. Sets parallel.address, and parallel.launcher to ray.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[RUN]",
        help="Continue an interrupted run: RUN, or by default the newest run of this file that did not complete.",
    ),
]
Baseline = Annotated[bool, typer.Option(show_default=False, help="Measure the baseline and report the speedup.")]
TrainOnly = Annotated[bool, typer.Option("--train-only", help="Skip all performance measurements.")]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Train a few steps, evaluate and save once; print how long the whole training will take."
    ),
]
AllowChanged = Annotated[
    bool,
    typer.Option(
        "--allow-changed",
        help="Resume even if the learning rate, the length of the training or the data has changed.",
    ),
]
AllowChangedData = Annotated[
    bool, typer.Option("--allow-changed", help="Continue even if the data is not that of the training.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan without running it.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the output of the workers and of Ray, and the full report.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and all other output on stderr.")
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id or a unique part of it, the run's folder, or latest.",
        show_default=False,
    ),
]
Directory = Annotated[
    Path, typer.Option("--directory", metavar="FOLDER", help="Folder with the runs (tracking.directory).")
]
RUNS = Path("runs")  # Default of ``--directory``
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|STEP",
        show_default=False,
        help="Checkpoint to use. Default: best if the experiment sets checkpoint.best, otherwise last.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result; warnings go to stderr.")]


def is_file(word: str) -> bool:
    """Return True for a word of the command line that names an experiment file."""
    return word.endswith((".yaml", ".yml")) and "=" not in Path(word).name


def with_address(overrides: Sequence[str] | None, address: str | None) -> list[str]:
    """Append the overrides that ``--address`` stands for, which take precedence."""
    joining = [f"parallel.address={json.dumps(address)}", "parallel.launcher=ray"] if address is not None else []
    return [*(overrides or ()), *joining]


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into errors with their exit codes, 130 and 143."""
    try:
        yield
    except Terminated as error:
        raise Interrupted(_noted("terminated by SIGTERM", error), exit_code=143) from None
    except KeyboardInterrupt as error:
        raise Interrupted(_noted("interrupted", error)) from None


def _noted(what: str, error: KeyboardInterrupt) -> str:
    """Return a message with the notes of an error, such as how to continue; see `pipeline.commands.invocation`."""
    return "; ".join([what, *getattr(error, "__notes__", ())])


@contextmanager
def opened(
    path: str | Path, overrides: Sequence[str] = (), *, as_json: bool, quiet: bool, prints: bool = False
) -> "Iterator[tuple[ExperimentFile, Terminal]]":
    """Read an experiment before torch is imported; yield it with the command's consoles, see `consoles`."""
    with consoles(as_json=as_json, quiet=quiet, prints=prints) as terminal:
        begin_stage("reading the experiment")
        from pipeline.experiment.load import load

        yield load(path, list(overrides)), terminal


@contextmanager
def consoles(*, as_json: bool, quiet: bool, prints: bool = False) -> "Iterator[Terminal]":
    """Yield a command's consoles. A line shows what the command is waiting for."""
    from pipeline.record.console import stages_on
    from pipeline.record.screen import Terminal

    terminal = Terminal.of(as_json=as_json, quiet=quiet)
    with interruptible(), ExitStack() as shown:
        if not as_json and not is_follower():
            # on the console of the notes, else they are printed into its line
            shown.enter_context(stages_on((Terminal.of(as_json=True, quiet=quiet) if prints else terminal).progress))
        yield terminal


@contextmanager
def head_start(file: "ExperimentFile", *, verbose: bool) -> Iterator[None]:
    """Start the processes that the experiment will need while torch is imported; print an error before they end."""
    begin_stage("importing torch")
    with interruptible(), undisturbed():
        from pipeline import registry

    with interruptible(), ExitStack() as begun:
        begun.enter_context(system.huge_pages())
        kind = registry.load("launchers", file.experiment.parallel.launcher).Launcher
        begun.enter_context(kind.preparing(file.experiment, verbose=verbose))
        try:
            with undisturbed():
                importlib.import_module("pipeline.commands.run")  # and torch with it
            yield
        except PipelineError as error:
            show(error)
            raise typer.Exit(error.exit_code) from None


def say(text: str, *, err: bool = False) -> None:
    """Print lines on standard output, or with ``err`` on standard error, as long as they are."""
    from pipeline.record.screen import OptionalConsole, linked

    OptionalConsole(stderr=err, highlight=False).print(linked(text), soft_wrap=True)


def print_json(text: str) -> None:
    """Print a JSON document; if no one reads it, the command has succeeded nevertheless."""
    try:
        typer.echo(re.sub("[\x7f-\x9f]", lambda control: f"\\u{ord(control[0]):04x}", text))
    except BrokenPipeError:
        redirect_to_null(sys.stdout.fileno())


def find_trained(run: str, directory: Path) -> Path:
    """Find a run whose model is used, see `pipeline.record.runs.find_trained`; print its note."""
    from pipeline.record import runs

    folder, note = runs.find_trained(run, directory)
    if note:
        say(f"note: {note}", err=True)
    return folder


def summary_of(run: str, directory: Path) -> "RunSummary":
    """Find a run and summarize it."""
    from pipeline.record import journal, runs
    from pipeline.record.runs import summarize_run

    folder = runs.find(run, directory)
    if (summary := summarize_run(folder)) is None:
        journal.opened(folder / journal.FILE_NAME)  # if it is damaged, the error says so
        raise UsageError(f"{folder}: this run ended before training started, so it has no result")
    return summary


def show(error: PipelineError) -> None:
    """Print an error for the user; an error in training comes with the traceback of the failed rank."""
    from pipeline.record.screen import OptionalConsole, write

    end_stage()
    write(OptionalConsole(stderr=True, highlight=False), error.told)


def strategies_of(text: str) -> tuple[str, ...]:
    """Parse the value of ``--strategies``, a list such as "single,ddp"."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    check_strategies(f"--strategies {text}", names)
    return names


def check_strategies(what: str, names: Sequence[str]) -> None:
    """Raise UsageError if one of the names is not a strategy's; ``what`` says where they are from."""
    from pipeline import registry
    from pipeline.wording import did_you_mean

    known = registry.names("strategies")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"{what}: {name!r} is not a strategy{hint}")


def counts_of(option: str, text: str, *, what: str = "number of workers") -> tuple[int, ...]:
    """Parse the value of ``option``, a list of numbers such as "1,2,4"; ``what`` says what each of them is."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and int(part) > 0):
            raise UsageError(f"{option} {text}: {part!r} is not a {what}. Use numbers of at least 1, e.g. 1,2,4.")
    return tuple(dict.fromkeys(map(int, parts)))
