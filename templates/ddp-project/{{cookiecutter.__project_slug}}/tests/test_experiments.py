"""Every experiment passes `pipeline check`."""

import subprocess
import sys

from conftest import ROOT

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def test_check() -> None:
    line = [sys.executable, "-m", "pipeline", "check", "--no-data", *map(str, EXPERIMENTS)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(EXPERIMENTS)


def test_there_are_experiments() -> None:
    assert EXPERIMENTS
