"""The launcher's contract under Ray's public interface, with which releases that were not tested are used."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_launchers_contract_holds_by_the_public_interface() -> None:
    contract = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_launchers.py", "-k", "ray"]
    ended = subprocess.run(
        [sys.executable, *contract],
        cwd=REPOSITORY, env={**os.environ, "PIPELINE_PLAIN_RAY": "1"}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
