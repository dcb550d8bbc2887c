"""Shared fixtures: the working directory, the smoke experiment and its training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline import Experiment, Parts, RunResult, run

ROOT = Path(__file__).parent.parent
SMOKE = "experiments/smoke.yaml"


@pytest.fixture(scope="session", autouse=True)
def working_directory() -> Iterator[None]:
    """Run in the project: experiments have relative paths, and its pyproject.toml lists the allowed packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture
def built() -> Parts:
    """Model, data, loss and metrics of the smoke experiment, built as a worker builds them."""
    return Experiment.load(SMOKE).build()


def train(folder: Path, *overrides: str) -> RunResult:
    """Train the smoke experiment in double precision, with its results in a folder."""
    where = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}", "tracking.log_model=false"]
    return run(SMOKE, "train.precision=fp64", *overrides, *where, baseline=False, quiet=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Result of the smoke experiment."""
    return train(tmp_path_factory.mktemp("trained"))
