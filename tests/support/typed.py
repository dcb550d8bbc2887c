"""A command of the documentation, read as the program that it names would read it. Nothing is started."""

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from pipeline.cli import _with_latest, app, load_verb
from pipeline.commands.options import counts_of, strategies_of
from pipeline.experiment.load import load

ROOT = Path(__file__).parents[2]
STANDS_FOR = {
    "FILE": "experiments/mlp.yaml",
    "FILE...": "experiments/mlp.yaml",
    "[KEY=VALUE]...": "train.epochs=2",
    "KEY=VALUE": "train.epochs=2",
    "[RUN]": "latest",
    "[ID]": "ID",
}
"""Words of the documentation that a reader replaces."""
_CLI: Any = typer.main.get_command(app)
_TARGETS = {
    target
    for makefile in (ROOT / "Makefile", *ROOT.glob("templates/*/*/Makefile"))
    for targets in re.findall(r"(?m)^([a-z -]+):", makefile.read_text())
    for target in targets.split()
}


class NotThere(Exception):
    """Something that a command names doesn't exist."""


def parts(line: str) -> list[str]:
    """The commands that a line joins, without redirections, variables before them and the folder of an environment."""
    joined = re.split(r"\s(?:&&|\|\||\||;)\s", line)
    return [
        re.sub(r"^((?:[A-Z_]+=\S+ )*)(?:\.venv/bin/)?", "", re.split(r"\s2?>+\s?", one)[0]).strip() for one in joined
    ]


def understand(command: str) -> bool:
    """Whether a command is one that can be read here; raises what is wrong with it."""
    program, *words = shlex.split(command)
    if program == "pipeline":
        _as_pipeline([STANDS_FOR.get(word, word) for word in words])
    elif program == "make":
        _as_make(words)
    elif program == "python" and words and not words[0].startswith("-"):
        _existing(ROOT / words[0])
    else:
        return False
    return True


def mentioned(command: str) -> None:
    """As `understand`, for a command in the middle of a sentence: it may leave out what doesn't matter there."""
    program, *words = [word for word in re.sub(r"\s+[>|].*", "", command).split() if not word.startswith("...")]
    if program == "make":
        _as_make(words)
        return
    if not words[0].startswith("-") and words[0] not in _CLI.commands:
        raise NotThere(f"pipeline {words[0]}")
    command_ = _CLI if words[0].startswith("-") else load_verb(words[0])
    known = {option for param in command_.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        if option not in known:
            raise NotThere(f"{command}: {option}")


def _as_pipeline(words: list[str]) -> None:
    if words[0].startswith("-"):
        mentioned(" ".join(["pipeline", *words]))
        return
    name, *rest = _with_latest(words)
    if name not in _CLI.commands:
        raise NotThere(f"pipeline {name}")
    given = load_verb(name).make_context(name, rest, parent=None).params
    words = [word for key in ("file", "files", "overrides") for word in _listed(given.get(key))]
    values = [word for word in words if "=" in word]  # of `check`, among the files
    for file in (word for word in words if word not in values):
        load(file, values)
    if given.get("strategies"):
        strategies_of(given["strategies"])
    if name == "benchmark" and given.get("workers"):
        counts_of("--workers", given["workers"])


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _as_make(words: list[str]) -> None:
    for target in words:
        if "=" not in target and target not in _TARGETS:
            raise NotThere(f"make {target}")


def _existing(path: Path) -> None:
    if not path.exists():
        raise NotThere(str(path.relative_to(ROOT)))
