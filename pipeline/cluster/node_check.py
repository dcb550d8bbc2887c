"""What a node of a joined cluster is asked for, by a task that runs there; see `checks`.

It loads no torch, which takes seconds.
"""

import importlib.util
import os
from importlib.machinery import PathFinder
from pathlib import Path

import psutil

from pipeline.cluster.code import Code
from pipeline.config.values import Frozen


class Question(Frozen):
    """What a node should look for."""

    code: Code
    data: tuple[str, ...] = ()
    """Paths that the data's arguments name; relative ones from the working directory."""
    token: Path | None = None
    """A file that the driver has written among the checkpoints."""


class Answer(Frozen):
    """What a node has found."""

    missing_packages: tuple[str, ...] = ()
    missing_data: tuple[str, ...] = ()
    storage: str | None = None
    """What is wrong with the place of checkpoints."""
    interfaces: tuple[str, ...] = ()


def check_node(question: str) -> str:
    """Look around on this node; both ends are JSON."""
    asked = Question.model_validate_json(question)
    folder = Path.cwd() / (asked.code.folder or ".")
    answer = Answer(
        missing_packages=tuple(name for name in asked.code.packages if not _is_there(name, asked.code)),
        missing_data=tuple(path for path in asked.data if not (folder / path).exists()),
        storage=_storage(asked.token) if asked.token else None,
        interfaces=tuple(sorted(interfaces())),
    )
    return answer.model_dump_json()


def interfaces() -> dict[str, tuple[str, ...]]:
    """This node's network interfaces with their addresses."""
    return {name: tuple(each.address for each in those) for name, those in psutil.net_if_addrs().items()}


def _is_there(package: str, code: Code) -> bool:
    """Whether a worker here will find a package; changes nothing, since Ray may make a worker of this process."""
    paths = [str(Path.cwd() / path) for path in code.paths]
    return bool(PathFinder.find_spec(package, paths) or importlib.util.find_spec(package))


def _storage(token: Path) -> str | None:
    if not token.exists():
        return "what this machine writes there isn't seen on that node: it is not the same storage"
    if not os.access(token.parent, os.W_OK):
        return "that node may not write there"
    return None
