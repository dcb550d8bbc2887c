"""Host names in Slurm's notation, such as ``gpu[01-03,7],login1``."""

import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import UsageError

_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_END_OF_HOSTS = re.compile(r"[#*\s]")
"""In a host file: a comment, a number of tasks, the end of the line."""


def first_in_host_file(path: str) -> str:
    """Return the first host of SLURM_HOSTFILE, which has rank 0: the file decides where tasks run.

    Raises:
        UsageError: this node can't read the file, or it names no host.
    """
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            for host in hosts_of(_END_OF_HOSTS.split(line.strip())[0]):
                return host
        why = "it names no host"
    except (OSError, ValueError) as error:
        why = f"{error}"
    raise UsageError(f"SLURM_HOSTFILE={path}: {why}. Set MASTER_ADDR to the host of rank 0, the first one of the file.")


def hosts_of(nodelist: str) -> Iterator[str]:
    """Yield the host names of a Slurm node list in order, e.g. of ``gpu[01-03,7],login1``.

    Raises:
        ValueError: a range is malformed.
    """
    for part in _PART.findall(nodelist):
        yield from _expand(part.strip())


def _expand(part: str) -> Iterator[str]:
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for number in _numbers(found[1]):
        for rest in _expand(after) if after else ("",):
            yield f"{before}{number}{rest}"


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ``01-03,7`` with their leading zeros."""
    for each in ranges.split(","):
        first, _, last = each.strip().partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
