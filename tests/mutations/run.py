"""Test the tests: put a fault into a copy of the tree, see which tests notice, and take it out again, fault by fault.

    python tests/mutations/run.py [NAME]...      all of faults.py, or those whose name has such a part

For each fault the tests that most likely notice come first, then all of `make test`; the first failure ends it.
The last line says how many faults were noticed. The exit code is 1 if fewer than 95% were, or one no longer applies.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TESTS = ("tests/unit", *(f"tests/system/{part}" for part in ("test_lint.py", "contract", "replay", "journeys")))
"""What `make test` runs, the quickest first."""
SPREAD = ("--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")
WANTED = 0.95  # Fraction of the faults that `make test` must notice: 38 of 40
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Noticed(NamedTuple):
    """Who noticed a fault; nobody if the test is empty."""

    fault: Fault
    test: str
    seconds: float


class Tree:
    """A copy of the files that git knows or would take, with the interpreter of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
                (folder / name).chmod((ROOT / name).stat().st_mode)

    def failure(self, *arguments: str) -> str:
        """The first test that fails in what ``python ARGUMENTS`` runs; empty if none does."""
        more = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": "-x -q"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=os.environ | more, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode == 0:
            return ""
        found = _FAILED.search(done.stdout)
        assert found or done.returncode == 1, f"it ended with {done.returncode}:\n{done.stdout[-3000:]}"
        return found[1] if found else arguments[-1]  # pytest can't name a test that ended the process

    def notices(self, fault: Fault) -> str:
        """The first test that notices a fault; empty if none does."""
        likely = (self.failure("-m", "pytest", each) for each in fault.first)
        return next(filter(None, likely), "") or next(filter(None, map(self._noticing, TESTS)), "")

    def _noticing(self, folder: str) -> str:
        """The first test of a folder that fails, and fails again: one that fails now and then has noticed nothing."""
        for _ in range(2):
            test = self.failure("-m", "pytest", *SPREAD, folder)
            if not test or self.failure("-m", "pytest", test):
                return test
        return ""

    def with_fault(self, fault: Fault) -> Noticed:
        """Who notices a fault."""
        path = self.folder / fault.file
        whole = path.read_text(encoding="utf-8")
        began = time.monotonic()
        try:
            path.write_text(broken(whole, fault), encoding="utf-8")
            test = self.notices(fault)
        finally:
            path.write_text(whole, encoding="utf-8")
        seconds = time.monotonic() - began
        if test and self.failure("-m", "pytest", test):
            raise SystemExit(f"{fault.name}: {test} fails without it, too; mend that first")
        return Noticed(fault, test, seconds)


def broken(text: str, fault: Fault) -> str:
    """The text of the fault's file, with the fault."""
    assert text.count(fault.old) == 1, f"stands there {text.count(fault.old)} times, not once: {fault.old!r}"
    changed = text.replace(fault.old, fault.new)
    compile(changed, fault.file, "exec")
    return changed


def misfits(faults: Iterable[Fault]) -> list[str]:
    """What no longer applies, and why."""
    found = []
    for fault in faults:
        try:
            broken((ROOT / fault.file).read_text(encoding="utf-8"), fault)
        except (AssertionError, OSError, SyntaxError) as error:
            found.append(f"{fault.name}: {fault.file}: {error}")
        gone = [each for each in fault.first if not (ROOT / each.partition("::")[0]).is_file()]
        found += [f"{fault.name}: there is no {each}" for each in gone]
    return found


def main(words: list[str]) -> int:
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if wrong := misfits(faults):
        print("these no longer apply; look what holds the promise today, and break that:", *wrong, sep="\n")
        return 1
    noticed = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Tree(Path(folder).resolve())
        for fault in faults:
            noticed.append(tree.with_fault(fault))
            print(told(noticed[-1]), flush=True)
    missed = [each.fault for each in noticed if not each.test]
    for fault in missed:
        print(f"no test noticed: {fault.name} ({fault.promise}); write one that does")
    count = len(noticed) - len(missed)
    print(f"{count} of {len(noticed)} faults were noticed, in {sum(each.seconds for each in noticed) / 60:.0f} minutes")
    return int(count < WANTED * len(noticed))


def told(one: Noticed) -> str:
    """A line of the table."""
    return f"{one.fault.name:<55} {one.seconds:5.0f} s  {one.test.removeprefix('tests/') or '-'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
