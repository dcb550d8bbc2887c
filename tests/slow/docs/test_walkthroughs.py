"""The documentation's examples, executed from top to bottom as a reader would, each page in a folder of its own.

A block with a title, such as ``title="mine/net.py"``, is written to that file, or added to its end below
``<!-- test: adds -->``. One below ``<!-- test: run -->`` is executed: commands one after the other, Python as a script.
``, with KEY=VALUE`` shortens the block's trainings, ``, exit N`` is the code it must end with, ``, prints PATTERN``
is in what its last command says, ``, needs MODULE`` an optional library. ``cd`` counts for the rest of the page. An
output below ``<!-- test: shown -->`` is what the command before it printed.
"""

# promise: every example of the docs runs

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blocks import Block, blocks
from packages import is_installed

from pipeline import registry

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "experiments" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = {page.relative_to(ROOT).as_posix(): blocks(page, root=ROOT) for page in FILES}
WALKED = {page: found for page, found in PAGES.items() if any(block.is_run for block in found)}
INSTEAD = {
    # The environment of the tests stays as it is; what is installed is the same, from the same pyproject.toml.
    "pip install -e .": "python -m pip install --quiet --no-deps --no-build-isolation --no-index --target packages .",
    "torchrun ": "python -m torch.distributed.run ",  # the same; its script may not be on the PATH
}


class Walk:
    """A reader's shell, which keeps its working directory."""

    def __init__(self, folder: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.command = command
        self.patch = monkeypatch
        self.printed = ""

    def through(self, block: Block) -> None:
        """Do what a block says."""
        if block.title:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a" if block.is_added else "w") as opened:
                opened.write(block.text + "\n")
        elif block.is_shown:
            assert [line for line in block.text.splitlines() if line not in self.printed] == [], self.printed
        elif block.kind == "python":
            file = self.folder / "example.py"
            file.write_text(block.text)
            self._shell("python example.py", block)
        else:
            for line in block.lines:
                self._line(line, block)
            assert re.search(block.option("prints"), self.printed), f"{block.place}:\n{self.printed}"

    def _line(self, line: str, block: Block) -> None:
        first, *words = line.split()
        if first == "cd":
            self.folder = (self.folder / words[0]).resolve()
            self.patch.chdir(self.folder)
        elif first == "pipeline" and not set("|>&*") & set(line):
            self._pipeline(words, block)
        else:
            known = next((said for said in INSTEAD if line.startswith(said)), "")
            self._shell(INSTEAD[known] + line.removeprefix(known) if known else line, block)
            registry._find_entry_points.cache_clear()  # a reader's next command is a new process

    def _pipeline(self, words: list[str], block: Block) -> None:
        """In this process, which saves importing torch each time."""
        more = block.option("with").split() if words[0] in ("run", "benchmark") else []
        if words[0] == "run" and not {"--resume", "--no-baseline"} & set(words):
            more = [*more, "benchmark.time_budget_s=8"]  # five pairs
        ended = self.command(*words, *more)
        self.printed = ended.output
        assert ended.code == int(block.option("exit") or 0), f"{block.place}: {' '.join(words)}\n{ended.output}"

    def _shell(self, line: str, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], cwd=self.folder, capture_output=True, text=True, check=False
        )
        self.printed = done.stdout + done.stderr
        assert done.returncode == int(block.option("exit") or 0), f"{block.place}: {line}\n{done.stdout}{done.stderr}"


@pytest.fixture
def walk(tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Walk]:
    folder = tmp_path / "pipeline"
    for name in ("experiments", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(folder / "packages")  # where an example may install itself, see INSTEAD
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))
    before = set(sys.modules)
    yield Walk(folder, command, monkeypatch)
    for name in sys.modules.keys() - before:  # the next page may have a module of the same name
        spec = getattr(sys.modules[name], "__spec__", None)
        places = (spec.origin, *(spec.submodule_search_locations or ())) if spec is not None else ()
        if any(str(place).startswith(str(tmp_path)) for place in places):  # a package without a file, too
            del sys.modules[name]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WALKED)
def test_the_examples_of_a_page(page: str, walk: Walk) -> None:
    for block in WALKED[page]:
        needed = block.option("needs")
        if block.title or block.is_shown or (block.is_run and (not needed or is_installed(needed))):
            walk.through(block)
