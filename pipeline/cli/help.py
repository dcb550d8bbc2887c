"""Registration of the commands: in groups, with examples below their help, and without redundant types."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from pipeline.cli.arguments import interruptible
from pipeline.errors import UsageError

GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Train and measure": {
        "run": (
            "pipeline run experiments/resnet.yaml",
            "pipeline run experiments/resnet.yaml train.epochs=2 parallel.workers=2",
        ),
        "benchmark": (
            "pipeline benchmark experiments/mlp.yaml --workers 1,2 --predict 8,64",
            "pipeline benchmark experiments/resnet.yaml --batch-sizes 16,32,64",
        ),
        "sweep": ("pipeline sweep experiments/sweep.yaml", "pipeline sweep experiments/sweep.yaml --resume latest"),
    },
    "Use the trained model": {
        "evaluate": (
            "pipeline evaluate latest",
            "pipeline evaluate latest --checkpoint last parallel.workers=1",
        ),
        "export": (
            "pipeline export latest --to model",
            "pipeline export latest --to model --checkpoint best --onnx",
        ),
    },
    "Look at results": {
        "list": ("pipeline list", "pipeline list --all"),
        "show": ("pipeline show latest", "pipeline show latest --full"),
        "compare": (
            "pipeline compare experiments/mlp.yaml --vary optimizer.lr=0.1,0.05 --seeds 5",
            "pipeline compare 22af 0eb4 91c3 7f02 --metric accuracy --margin 0.5",
        ),
        "ui": ("pipeline ui", "pipeline ui --port 5001 --store sqlite:////data/mlflow.db"),
        "sync": ("pipeline sync latest", "pipeline sync latest --to http://localhost:5000"),
        "remove": (
            "pipeline remove 22af 0eb4",
            "pipeline remove --failed",
        ),
    },
    "Run on a cluster": {
        "doctor": ("pipeline doctor", "pipeline doctor --address HOST:6379"),
    },
    "Set up a project": {
        "new": (
            "pipeline new ddp-project my-project",
            "pipeline new ddp-project my-project --no-input --set data=table",
        ),
        "check": (
            "pipeline check experiments/mlp.yaml",
            "pipeline check --no-data experiments/mlp.yaml experiments/resnet.yaml",
        ),
        "schema": ("pipeline schema", "pipeline schema > experiments/experiment.schema.json"),
    },
}
"""Commands by group, in the order of the help, each with examples."""


def below(examples: Sequence[str]) -> str:
    """Return the text below the help of a command. Its first line is empty: typer would remove the indentation."""
    return "\n".join(["", "Examples:", *(f"  {example}" for example in examples)])


class Group(TyperGroup):
    """The command ``pipeline`` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, without their types in the help."""
        return _untyped(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command; else typer would give SIGTERM the exit code of Ctrl-C, and no message."""
        with interruptible():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A verb of the command line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options, without the types of arguments and flags in the help."""
        return _untyped(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line as the panels below it write them."""
        arguments = [one for one in self.params if isinstance(one, TyperArgument)]
        return [self.options_metavar or "", *(one.metavar or one.name.upper() for one in arguments)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line.

        Raises:
            UsageError: a key of the experiment is written as an option.
        """
        if not ctx.resilient_parsing and any(one.name == "overrides" for one in self.params):
            options = {name for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)}
            refuse_dashes(args, options=options)
        return super().parse_args(ctx, args)


def refuse_dashes(words: Sequence[str], *, options: Collection[str]) -> None:
    """Reject a key of the experiment that is written as an option, such as ``--train.epochs 3`` or ``--epochs=3``.

    Raises:
        UsageError: a key is written as an option; the message contains the override.
    """
    file = next((Path(word) for word in words if not word.startswith("-")), None)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        if not word.startswith("--") or name in options or not (key := _key(name, file=file)):
            continue
        following = words[index + 1] if index + 1 < len(words) else "-"
        if not equals and (following.startswith("-") or "=" in following):
            raise UsageError(f"{word}: not an option. Write {key}=VALUE, without dashes.")
        words_used = word if equals else f"{word} {following}"
        value = value if equals else following
        raise UsageError(f"{words_used}: not an option. Write {key}={value}, without dashes.")


def _key(option: str, *, file: Path | None) -> str:
    """Return the key that an unknown option means; empty if there is no such key, or several."""
    key = option.lstrip("-").replace("-", "_")
    if "." in key:  # if it is also unknown without dashes, the next message says so
        return key
    from pipeline.experiment import load

    known = [each for each in load.list_keys(file) if "[" not in each]
    if any(each == key or each.startswith(f"{key}.") for each in known):
        return key
    meant = [each for each in known if each.rpartition(".")[2] == key]
    return meant[0] if len(meant) == 1 else ""


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument) or (isinstance(parameter, TyperOption) and parameter.is_flag):
            parameter.display_type_rich = _nothing  # type: ignore[method-assign]
    return parameters


def _nothing(ctx: Any) -> None:
    """Return nothing instead of a type."""
