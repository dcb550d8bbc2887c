"""The command ``pipeline``: its verbs, their help, and its entry point.

A verb is a function with its arguments, in a module that is imported when the verb is called: ``--help`` answers at
once, and a command imports only what it needs.
"""

import errno
import importlib
import os
import platform
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from pipeline.commands.options import interruptible, show
from pipeline.errors import PipelineError, ResourceError, UsageError, interrupt
from pipeline.system import hang_up, importable, missing_user_variables
from pipeline.wording import nearest

_DISTRIBUTION = "ddp-pipeline"
_SHOWN = ("torch", "ray", "mlflow")
_HELP = "Declarative experiments for data-parallel PyTorch training, with measured speedups."


class Verb(NamedTuple):
    """Entry of the help."""

    help: str
    examples: tuple[str, str]
    place: str = ""
    """Module and function; empty: the function with the verb's name in its module of `pipeline.commands`."""


GROUPS: Mapping[str, Mapping[str, Verb]] = {
    "Train and measure": {
        "run": Verb(
            "Train an experiment and report its speedup over a baseline.",
            (
                "pipeline run experiments/resnet.yaml",
                "pipeline run experiments/resnet.yaml train.epochs=2 parallel.workers=2",
            ),
            "pipeline.cli.experiments:run",
        ),
        "benchmark": Verb(
            "Measure the speed of strategies, workers, batch sizes and other keys.",
            (
                "pipeline benchmark experiments/mlp.yaml --workers 1,2 --predict 8,64",
                "pipeline benchmark experiments/resnet.yaml --vary loader.num_workers=0,2",
            ),
            "pipeline.cli.experiments:benchmark",
        ),
        "sweep": Verb(
            "Search hyperparameters: train the trials of the file's sweep section in parallel and find the best.",
            ("pipeline sweep experiments/sweep.yaml", "pipeline sweep experiments/sweep.yaml --resume latest"),
            "pipeline.cli.experiments:sweep",
        ),
    },
    "Use the trained model": {
        "evaluate": Verb(
            "Evaluate a checkpoint of an ended run: loss and metrics on the test set, with any number of workers.",
            ("pipeline evaluate latest", "pipeline evaluate latest --checkpoint last parallel.workers=1"),
        ),
        "export": Verb(
            "Export the trained model of a run: its weights, and a program that runs without the model's code.",
            ("pipeline export latest --to model", "pipeline export latest --to model --checkpoint best --onnx"),
        ),
    },
    "Look at results": {
        "list": Verb(
            "List the runs in a folder, newest last.",
            ("pipeline list", "pipeline list --all"),
            "pipeline.commands.list:list_runs",
        ),
        "show": Verb(
            "Show the result of a run, or how far a running run is.",
            ("pipeline show latest", "pipeline show latest --full"),
        ),
        "compare": Verb(
            "Compare experiments: which is better beyond the luck of their seeds, and what differs.",
            (
                "pipeline compare experiments/mlp.yaml --vary optimizer.lr=0.1,0.05 --seeds 5",
                "pipeline compare 22af 0eb4 91c3 7f02 --metric accuracy --margin 0.5",
            ),
            "pipeline.cli.comparison:compare",
        ),
        "ui": Verb(
            "Serve the MLflow UI with the results on localhost.",
            ("pipeline ui", "pipeline ui --port 5001 --store sqlite:////data/mlflow.db"),
        ),
        "sync": Verb(
            "Send a run, or a sweep and its trials, to the tracking server, without duplicates.",
            ("pipeline sync latest", "pipeline sync latest --to http://localhost:5000"),
        ),
        "remove": Verb(
            "Remove runs: their folders, and their runs in MLflow, which can be restored there.",
            ("pipeline remove 22af 0eb4", "pipeline remove --failed"),
        ),
    },
    "Run on a cluster": {
        "doctor": Verb(
            "Check this machine or a cluster, and print each problem with its fix.",
            ("pipeline doctor", "pipeline doctor --address HOST:6379"),
        ),
    },
    "Set up a project": {
        "new": Verb(
            "Create a project from a template.",
            (
                "pipeline new ddp-project my-project",
                "pipeline new ddp-project my-project --no-input --set data=table",
            ),
        ),
        "check": Verb(
            "Check experiment files without training: each component, the data, and a few samples.",
            (
                "pipeline check experiments/mlp.yaml",
                "pipeline check --no-data experiments/mlp.yaml experiments/resnet.yaml",
            ),
        ),
        "schema": Verb(
            "Print the JSON Schema of experiment files, for editors.",
            ("pipeline schema", "pipeline schema > experiments/experiment.schema.json"),
        ),
    },
}
"""Verbs by group, in the order of the help."""


class Command(TyperCommand):
    """A verb of the command line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options, without the types of arguments and flags in the help."""
        return _hide_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line as the panels below it write them."""
        arguments = [one for one in self.params if isinstance(one, TyperArgument)]
        return [self.options_metavar or "", *(one.metavar or one.name.upper() for one in arguments)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; refuse a key of the experiment that is written as an option."""
        if not ctx.resilient_parsing and any(one.name == "overrides" for one in self.params):
            options = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
            refuse_dashes(args, options=options)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """The command ``pipeline`` itself; its commands are those of the help, without arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, without their types in the help."""
        return _hide_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the verb that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name and command else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; else typer would give SIGTERM the exit code of Ctrl-C, and no message."""
        with interruptible():
            return super().invoke(ctx)


def load_verb(name: str) -> Command:
    """Import a verb, and return it as a command with its arguments."""
    group, verb = next((group, verbs[name]) for group, verbs in GROUPS.items() if name in verbs)
    module, function = (verb.place or f"pipeline.commands.{name}:{name}").split(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        from pipeline.experiment.targets import lacking

        if not (missing := lacking(f"pipeline {name}", (error.name or "pipeline").partition(".")[0])):
            raise
        raise UsageError(missing) from None
    one = typer.Typer(add_completion=False, context_settings=_SETTINGS)
    # The first line is empty: typer would remove the indentation.
    examples = "\n".join(["", "Examples:", *(f"  {example}" for example in verb.examples)])
    one.command(name, cls=Command, help=verb.help, epilog=examples, rich_help_panel=group)(getattr(imported, function))
    command = typer.main.get_command(one)
    assert isinstance(command, Command)
    return command


def refuse_dashes(words: Sequence[str], *, options: Collection[str]) -> None:
    """Reject a key of the experiment that is written as an option, such as ``--train.epochs 3`` or ``--lr=0.1``."""
    for word, following in zip(words, [*words, "-"][1:], strict=True):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        if not word.startswith("--") or name in options or nearest(name, options, cutoff=0.7):
            continue  # click names the option that was probably meant
        if not (equals or following.startswith("-") or "=" in following):
            word, value = f"{word} {following}", following
        key = name.lstrip("-").replace("-", "_")
        raise UsageError(f"{word}: not an option. Write {key}={value or 'VALUE'}, without dashes.")


def _hide_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument) or (isinstance(parameter, TyperOption) and parameter.is_flag):
            parameter.display_type_rich = _nothing  # type: ignore[method-assign]
    return parameters


def _nothing(ctx: Any) -> None:
    """Return nothing instead of a type."""


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


def _checkout() -> str:
    """Return the commit of this code if it runs from a git checkout, or an empty text."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return ""
    from pipeline.record.provenance import git

    commit = git("rev-parse", "--short=12", "HEAD", folder=root)
    changed = git("status", "--porcelain", "--untracked-files=no", folder=root)
    return f" (commit {commit}{', with changes' if changed else ''})" if commit else ""


def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Take the options of the command itself."""


_SETTINGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=Group, help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_SETTINGS
)
app.callback(help=_HELP)(_options)
for _group, _verbs in GROUPS.items():
    for _name, _verb in _verbs.items():
        app.command(_name, help=_verb.help, rich_help_panel=_group)(lambda: None)


def main() -> NoReturn:
    """Run the command line; print an error that the user can fix without a traceback."""
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
        if error.errno not in (errno.ENAMETOOLONG, errno.ENOSPC, errno.EROFS):
            raise
        kind: type[PipelineError] = UsageError if error.errno == errno.ENAMETOOLONG else ResourceError
        show(kind(f"{str(error.filename or 'the output')[:200]}: {error.strerror}"))
        sys.exit(kind.exit_code)
    sys.exit(0)


def _with_latest(arguments: list[str]) -> list[str]:
    """Give ``--resume`` without a value the value ``latest``, since an option of typer can't have an optional value."""
    following = [*arguments[1:], "--"]
    return [
        "--resume=latest" if word == "--resume" and (next_.startswith("-") or "=" in next_) else word
        for word, next_ in zip(arguments, following, strict=False)
    ]
