"""Every experiment passes `pipeline check`."""

from pathlib import Path

import pytest
from conftest import ROOT
from pipeline.cli import app
from typer.testing import CliRunner

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_check(path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--no-data", str(path)])

    assert result.exit_code == 0, result.output


def test_there_are_experiments() -> None:
    assert EXPERIMENTS
