"""Projects baked from the templates, and commands in them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.commands.new import create, questions, root

REPOSITORY = Path(__file__).parents[2]


class Baked(NamedTuple):
    """A project and what was answered."""

    template: str
    answers: Mapping[str, str]
    folder: Path

    @property
    def package(self) -> str:
        return self.folder.name.replace("-", "_")

    def files(self) -> set[str]:
        """All files but git's own, relative to the project."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        return {path.as_posix() for path in found if ".git" not in path.parts}


def combinations(template: str) -> list[dict[str, str]]:
    """All answers to what the template asks, the name aside."""
    choices = {key: values for key, values in questions(root() / template).items() if values}
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def bake(folder: Path, template: str = "ddp-project", **answers: str) -> Baked:
    settings = [f"{key}={value}" for key, value in answers.items()]
    return Baked(template, answers, create(template, folder, settings, no_input=True).folder)


def command(folder: Path, *line: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder; one that begins with a Python module's name is that module's."""
    first = [sys.executable, "-m", *line] if line[0] in _MODULES else list(line)
    inherited = {key: value for key, value in os.environ.items() if key not in ("PIPELINE_SOURCE", "MAKEFLAGS")}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(part) for part in first], cwd=folder, env=inherited | environment, capture_output=True, text=True,
        check=False, timeout=230,
    )  # fmt: skip
    return done


_MODULES = ("cookiecutter", "cruft", "hatchling", "mypy", "pip", "pipeline", "pytest", "ruff", "venv")


def succeed(folder: Path, *line: str | Path, **environment: Any) -> str:
    done = command(folder, *line, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, line))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    return succeed(folder, "git", *identity, *arguments).strip()


@pytest.fixture(scope="session")
def baked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Baked, ...]:
    """Every template with all answers, all in one folder."""
    parent = tmp_path_factory.mktemp("baked")
    return tuple(
        bake(parent / f"{template.replace('-', '')}-{number:02}", template, **answers)
        for template in ("ddp-project", "dp-prototype")
        for number, answers in enumerate(combinations(template))
    )
