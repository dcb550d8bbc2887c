"""Every experiment passes `pipeline check`."""

import subprocess
import sys

from conftest import ROOT


def test_check() -> None:
    experiments = sorted((ROOT / "experiments").glob("*.yaml"))
    line = [sys.executable, "-m", "pipeline", "check", "--no-data", *map(str, experiments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(experiments) > 0
