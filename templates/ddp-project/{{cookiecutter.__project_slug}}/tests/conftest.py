"""Shared fixtures: the working directory, data without a download, the smoke experiment and its training."""

from collections.abc import Iterator
from pathlib import Path

{% if cookiecutter.data == "image_folder" -%}
import numpy as np
import pytest
from PIL import Image
{% else -%}
import pytest
{% endif -%}
from pipeline import Experiment, Parts, RunResult, run
from torch import Tensor
{%- if cookiecutter.data == "table" %}

from {{ cookiecutter.__package_name }}.example_table import example_table
{%- endif %}

ROOT = Path(__file__).parent.parent
SMOKE = "experiments/smoke.yaml"


@pytest.fixture(scope="session", autouse=True)
def working_directory() -> Iterator[None]:
    """Run in the project: experiments have relative paths, and its pyproject.toml lists the allowed packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="session")
{% if cookiecutter.data == "image_folder" -%}
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Noise in a few image files, so that the tests don't depend on what lies in data/images."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(256, size=(100, 40, 40, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        file = folder / str(number % 10) / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    return [f"data.directory={folder}"]
{% elif cookiecutter.data == "table" -%}
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The example table, so that the tests don't depend on what lies in data."""
    return [f"data.path={example_table(str(tmp_path_factory.mktemp('data') / 'table.csv'))}"]
{% else -%}
def overrides() -> list[str]:
    """Changes to an experiment, if the tests need any, such as other data: ["data.limit=10"]."""
    return []
{% endif %}

@pytest.fixture
def built(overrides: list[str]) -> Parts:
    """Model, data, loss and metrics of the smoke experiment, built as a worker builds them."""
    return Experiment.load(SMOKE, *overrides).build()


def tensors(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of a batch, a row for each sample."""
    return tuple(batch)


def train(folder: Path, *overrides: str) -> RunResult:
    """Train the smoke experiment in double precision, with its results in a folder."""
    where = [f"tracking.uri=sqlite:///{folder}/mlflow.db", f"tracking.directory={folder}", "tracking.log_model=false"]
    return run(SMOKE, "train.precision=fp64", *overrides, *where, baseline=False, quiet=True)


@pytest.fixture(scope="session")
def trained(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Result of the smoke experiment."""
    return train(tmp_path_factory.mktemp("trained"), *overrides)
