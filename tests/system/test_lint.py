"""Format, style, types and layers of the code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("line", ["ruff format --check .", "ruff check .", "mypy", "lint-imports"])
def test_the_code_passes(line: str) -> None:
    program, *arguments = line.split()
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        pytest.fail(f"{line}\n{done.stdout}", pytrace=False)
