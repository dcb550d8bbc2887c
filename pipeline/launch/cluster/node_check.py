"""Task that checks one node of a cluster for `checks`: question, answer, and the function that runs on the node.

Apart from `checks` because it must not import torch, which takes seconds.
"""

import importlib.util
import os
from importlib.machinery import PathFinder
from pathlib import Path

from pipeline.errors import ResourceError
from pipeline.experiment.values import Frozen
from pipeline.launch.cluster.code import Code
from pipeline.protocol.channel import connect


class Question(Frozen):
    """Question to a node: what workers will need there."""

    code: Code
    driver: tuple[str, int]
    """Host and port at which the driver listens."""
    data: tuple[str, ...] = ()
    """Paths in the arguments of the data; relative ones start at the working directory."""
    token: Path | None = None
    """File that the driver has written among the checkpoints."""


class Answer(Frozen):
    """Answer of a node."""

    missing_packages: tuple[str, ...] = ()
    missing_data: tuple[str, ...] = ()
    storage: str | None = None
    """Problem with the checkpoint storage, if any."""
    driver: str | None = None
    """Problem with the connection to the driver, if any."""


def check_node(question: str) -> str:
    """Check this node; question and answer are JSON."""
    asked = Question.model_validate_json(question)
    folder = Path.cwd() / (asked.code.folder or ".")
    answer = Answer(
        missing_packages=tuple(name for name in asked.code.packages if not _is_there(name, asked.code)),
        missing_data=tuple(path for path in asked.data if not (folder / path).exists()),
        storage=_storage(asked.token) if asked.token else None,
        driver=_driver(*asked.driver),
    )
    return answer.model_dump_json()


def _is_there(package: str, code: Code) -> bool:
    """Tell if workers will find a package; leaves ``sys.path`` alone, since Ray may reuse this process for a worker."""
    paths = [str(Path.cwd() / path) for path in code.paths]
    return bool(PathFinder.find_spec(package, paths) or importlib.util.find_spec(package))


def _storage(token: Path) -> str | None:
    if not token.exists():
        return "files that this machine writes there do not appear on that node: the storage is not shared"
    if not os.access(token.parent, os.W_OK):
        return "that node has no permission to write there"
    return None


def _driver(host: str, port: int) -> str | None:
    try:
        connect(host, port, subject="it").close()
    except ResourceError as error:
        return str(error)
    return None
