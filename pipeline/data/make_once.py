"""Files that are made when they are first needed, such as example data or a download."""

import tempfile
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch

from pipeline.protocol.progress import note
from pipeline.system.lock_file import LockFile


def make_once(path: Path, make: Callable[[Path], object], *, what: str) -> None:
    """Make a file or folder if it does not exist, however many processes need it; print a line that says so.

    Args:
        path: where it is needed. It appears there when it is complete.
        make: writes it to another path of the same file system. Random numbers that it draws change nothing else.
        what: what is made, for the line.

    Raises:
        FileNotFoundError: it does not exist, and only the outline of a model is built, which makes nothing.
        OSError: it can't be written.
    """
    if path.exists():
        return
    if torch.get_default_device().type == "meta":
        raise FileNotFoundError(f"{path} does not exist yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with LockFile(path.with_name(f"{path.name}.lock"), patience_s=inf):
        if path.exists():
            return
        note(f"{path} does not exist. Making {what}.")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, torch.random.fork_rng(devices=[]):
            made = Path(folder) / path.name
            make(made)
            made.rename(path)
