"""Shell completion. It runs at each press of Tab, so nothing here imports torch, Ray or MLflow."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

_YAML = "*.y*ml"
_NOSPACE = "    [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *[=/] ]] && compopt -o nospace\n    return 0"


def files(incomplete: str) -> list[str]:
    """Return YAML files whose path begins with ``incomplete``, in this folder and one level below."""
    start = incomplete.rstrip("*?[")
    found = [path for path in Path().glob(f"{start}{_YAML}") if path.is_file()]
    inside = [path for folder in Path().glob(f"{start}*/") if folder.is_dir() for path in folder.glob(_YAML)]
    visible = [path for path in (*found, *inside) if not any(part.startswith(".") for part in path.parts)]
    return sorted(set(map(str, visible)))


def overrides(context: typer.Context, incomplete: str) -> list[str]:
    """Return keys of the experiment file, or after ``=`` the values that the key can have.

    bash splits words at each ``=``; other shells don't.
    """
    from pipeline.config import vocabulary

    before = [word for word in context.params.get("overrides") or () if word != "="]
    if before and "=" not in before[-1] and os.environ.get("_PIPELINE_COMPLETE") == "complete_bash":
        return _beginning(vocabulary.values_of(before[-1]), incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={known}" for known in _beginning(vocabulary.values_of(key), value)]
    file = context.params.get("file")
    keys = vocabulary.all_keys(Path(file) if isinstance(file, str) else None)
    return _beginning(_one_level(keys, incomplete), incomplete)


def runs(incomplete: str) -> list[str]:
    """Return the runs in the folder ``runs``, newest first."""
    found = sorted((path.parent.name for path in Path("runs").glob("*/events.jsonl")), reverse=True)
    return _beginning(["latest", *found], incomplete)


def strategies(incomplete: str) -> list[str]:
    """Return strategies for the last name in a list such as "single,ddp"."""
    from pipeline import registry

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(registry.names("strategies"), last)]


def templates(incomplete: str) -> list[str]:
    """Return the templates of ``pipeline new``."""
    from pipeline.commands.new import catalog

    return _beginning(catalog.names(), incomplete)


def prepare(arguments: Sequence[str]) -> None:
    """Make ``--show-completion`` and ``--install-completion`` write a bash script that adds no space after ``key=``."""
    if any(word.startswith(("--install-completion", "--show-completion")) for word in arguments):
        from typer import _completion_shared as shared

        script = shared.COMPLETION_SCRIPT_BASH.replace("    return 0", _NOSPACE)
        shared._completion_scripts["bash"] = script


def _one_level(keys: Sequence[str], incomplete: str) -> Iterator[str]:
    """Yield keys with their ``=``, but only the name of a section that isn't typed yet, e.g. ``train.``."""
    depth = incomplete.count(".")
    seen = dict.fromkeys(
        key if key.count(".") <= depth else f"{'.'.join(key.split('.')[: depth + 1])}." for key in keys
    )
    yield from (name if name.endswith(".") else f"{name}=" for name in seen)


def _beginning(words: Sequence[str] | Iterator[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]
