"""The command ``pipeline``: parse and print, nothing else.

Commands import what they need when they run, so that ``--help`` answers at once and doesn't load torch.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
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
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Let the workers' and Ray's output through.")]


class Scaling(StrEnum):
    """What stays the same when workers are added."""

    strong = "strong"
    weak = "weak"
    both = "both"


@app.command()
def run(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    baseline: Annotated[bool, typer.Option(help="Measure the baseline that the speedup is relative to.")] = True,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[RUN]", help="Go on with an interrupted run: the newest one of this experiment, or RUN."),
    ] = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Resume although the experiment has changed.")
    ] = False,
    verbose: Verbose = False,
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
    with _interruptible():
        runner.run(
            experiment,
            with_baseline=baseline,
            verbose=verbose,
            stdout=stdout,
            resume=resume,
            allow_changed=allow_changed,
        )


@app.command()
def compare(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    strategies: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Strategies; default: those of the file's compare.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N,...", help="Numbers of workers; default: those of the file's compare.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each cell, in turn with the others.")] = 3,
    scaling: Annotated[
        Scaling, typer.Option(help="strong: the same global batch; weak: the same batch for each worker.")
    ] = Scaling.strong,
    profile: Annotated[bool, typer.Option("--profile", help="Record a torch.profiler trace of each cell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, all else on stderr.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure strategies and numbers of workers side by side, in short trials taken in turn."""
    import rich.console

    from pipeline.config.load import load
    from pipeline.matrix import Wanted

    experiment = load(file, overrides or [])
    wanted = Wanted(
        strategies=_strategies(strategies) if strategies is not None else (),
        workers=_counts("--workers", workers) if workers is not None else (),
        scaling=scaling.value,
        repeats=repeats,
        profile=profile,
    )
    from pipeline.comparison import compare
    from pipeline.speedup.report import comparison_json

    with _interruptible():
        compare(
            experiment,
            wanted=wanted,
            verbose=verbose,
            terminal=rich.console.Console(highlight=False, stderr=as_json),
            show=lambda report: typer.echo(comparison_json(report)) if as_json else None,
        )


@app.command("tune-batch")
def tune_batch(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    most: Annotated[int | None, typer.Option("--max", min=1, help="Largest batch of one device to try.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, all else on stderr.")] = False,
    verbose: Verbose = False,
) -> None:
    """Find the batch size of a device: the smallest at which throughput stops growing."""
    import rich.console

    from pipeline.config.load import load

    experiment = load(file, overrides or [])
    from pipeline import tuning

    terminal = rich.console.Console(highlight=False, stderr=as_json)
    with _interruptible():
        tuned = tuning.tune_batch(experiment, most=most, verbose=verbose, terminal=terminal)
    if as_json:
        typer.echo(tuned.model_dump_json(indent=2))


@app.command()
def predict(
    file: FileArgument,
    overrides: Overrides = None,
    *,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="The most workers to predict.")] = 64,
    link: Annotated[
        str | None,
        typer.Option(metavar="BANDWIDTH,LATENCY", help="Between workers, e.g. 25Gbit,20us; default: measured here."),
    ] = None,
    scaling: Annotated[
        Scaling, typer.Option(help="strong: the same global batch; weak: the same batch for each worker.")
    ] = Scaling.both,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, all else on stderr.")] = False,
    verbose: Verbose = False,
) -> None:
    """Predict speedup and efficiency on more workers than there are, from a few seconds of measuring."""
    import rich.console

    from pipeline.config.load import load
    from pipeline.speedup.link import parse

    experiment = load(file, overrides or [])
    given = parse(link) if link is not None else None
    from pipeline import prediction

    with _interruptible():
        prediction.predict(
            experiment,
            workers=workers,
            link=given,
            scaling=scaling.value,
            verbose=verbose,
            terminal=rich.console.Console(highlight=False, stderr=as_json),
            show=lambda forecast: typer.echo(forecast.model_dump_json(indent=2)) if as_json else None,
        )


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


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM as errors with their exit codes."""
    try:
        yield
    except Terminated:
        raise Interrupted("terminated by SIGTERM", exit_code=143) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


def _strategies(text: str) -> tuple[str, ...]:
    """The strategies of a list such as "single,ddp"."""
    from pipeline import registry
    from pipeline.config.nearest import did_you_mean

    known = registry.names("strategies")
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"--strategies {text}: no strategy is called {name!r}{hint}")
    return names


def _counts(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as "1,2,4"."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and int(part) > 0):
            raise UsageError(
                f"{option} {text}: {part!r} is not a number of workers; write numbers from 1 on, e.g. 1,2,4"
            )
    return tuple(dict.fromkeys(map(int, parts)))


def main() -> NoReturn:
    """Entry point. Errors that are the user's to mend are shown without a traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    _make_importable(Path.cwd())
    try:
        app(args=_with_latest(sys.argv[1:]), prog_name="pipeline")
    except PipelineError as error:
        _show(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def _with_latest(arguments: list[str]) -> list[str]:
    """``--resume`` may stand alone, which its option can't; an override or another option is no run."""
    following = [*arguments[1:], "--"]
    return [
        "--resume=latest" if word == "--resume" and (next_.startswith("-") or "=" in next_) else word
        for word, next_ in zip(arguments, following, strict=True)
    ]


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
