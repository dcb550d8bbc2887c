"""Whatever is answered, what comes out is a project: its files, their form, its experiments."""

# promise: a project from the template passes its own tests
# promise: all answers; the wheel
# promise: each file of `experiments/` and each answer of the templates runs as it is

import ast
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from baking import REPOSITORY, Baked, bake, command, git, succeed
from typer.testing import CliRunner

from pipeline import cli
from pipeline.experiment.problems import experiment_json_schema

KINDS = ("digits", "image_folder", "table", "text")
SCHEMA = "experiments/experiment.schema.json"


def expected(project: Baked) -> set[str]:
    files = {".gitignore", "AGENTS.md", "Makefile", "README.md", "pipeline.mk", "pyproject.toml", SCHEMA}
    files |= {"experiments/first.yaml", "experiments/smoke.yaml"}
    files |= {f"tests/{name}.py" for name in ("conftest", "test_data", "test_experiments", "test_model")}
    files |= {f"src/{project.package}/{name}.py" for name in ("__init__", "data", "model")}
    if project.template == "dp-prototype":
        return files | {"notebooks/prototype.ipynb", "tests/test_notebook.py"}
    files |= {".github/workflows/test.yaml", "job.sbatch", "experiments/scaling.yaml"}
    files |= {f"src/{project.package}/predict.py", "tests/test_predict.py", "tests/test_training.py"}
    if project.answers["docker"] == "yes":
        files |= {".dockerignore", "docker/Dockerfile", "docker/compose.yaml"}
    return files


def test_the_files_are_those(baked: tuple[Baked, ...]) -> None:
    assert len(baked) == 10
    for project in baked:
        assert project.files() == expected(project), project.answers


def test_files_are_whole(baked: tuple[Baked, ...]) -> None:
    """No marks of the template are left; they end in one newline, without gaps, and can be read."""
    mark = re.compile(r"(?<!\$)\{\{|\{%|\{#|cookiecutter\.")  # ${{ is the CI's
    for project in baked:
        for name in project.files():
            text = (project.folder / name).read_text()
            assert not mark.search(text), f"{project.folder / name}: {mark.search(text)}"
            assert re.search(r"[^\n]\n\Z", text), name
            assert not re.search(r"[ \t]\n", text), name
            assert "\n\n\n" not in text or name.endswith(".py"), name
            if name.endswith(".yaml"):
                yaml.safe_load(text)
            if name.endswith((".json", ".ipynb")):
                json.loads(text)


def test_python_is_formatted_and_clean(baked: tuple[Baked, ...]) -> None:
    parent = baked[0].folder.parent
    hooks = REPOSITORY / "templates" / "ddp-project" / "hooks"

    succeed(parent, "ruff", "format", "--check", "--no-cache", ".")
    succeed(parent, "ruff", "check", "--no-cache", ".")
    succeed(REPOSITORY, "ruff", "check", "--no-cache", "--no-force-exclude", "--ignore", "S,T20,Q,D", hooks)


PROVIDED = {"pipeline", "conftest"}
"""Modules that no dependency of the project provides: installed before the project, or next to the tests."""
CALLED = {"pillow": "PIL", "scikit-learn": "sklearn"}


def test_what_a_project_imports_is_among_its_dependencies(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        toml = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]
        assert "ddp-pipeline" not in str(toml)
        required, developing = toml["dependencies"], toml["optional-dependencies"]["dev"]
        known = PROVIDED | {project.package} | {CALLED.get(name, name) for name in required}
        for name in project.files():
            for module in imported(project.folder / name) - set(sys.stdlib_module_names):
                allowed = known if name.startswith("src/") else known | set(developing)
                assert module in allowed, f"{name} of {project.folder} imports {module}"


def imported(file: Path) -> set[str]:
    """The packages that a Python file or a notebook imports, or the components of an experiment name."""
    text = file.read_text()
    if file.suffix == ".yaml":
        return set(re.findall(r"_target_: (\w+)\.", text))
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    elif file.suffix != ".py":
        return set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_every_experiment_passes_the_check_and_names_its_schema(
    baked: tuple[Baked, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for project in baked:
        monkeypatch.chdir(project.folder)
        monkeypatch.setattr(sys, "path", [str(project.folder / "src"), *sys.path])
        files = sorted(Path("experiments").glob("*.yaml"))
        result = CliRunner().invoke(cli.app, ["check", "--no-data", *map(str, files)])
        first = yaml.safe_load(files[0].read_text())

        assert result.exit_code == 0, f"{project.folder} {project.answers}: {result.output}"
        assert first["parallel"]["strategy"] == project.answers.get("strategy", "ddp")
        assert json.loads(Path(SCHEMA).read_text()) == experiment_json_schema()
        for path in files:
            lines = path.read_text().splitlines()[:2]
            assert lines == ["# yaml-language-server: $schema=experiment.schema.json", f"# pipeline run {path}"]


@pytest.mark.parametrize("data", [None, *KINDS], ids=str)  # the prototype has no data to choose
def test_types_of_a_whole_project(baked: tuple[Baked, ...], data: str | None) -> None:
    project = next(each for each in baked if each.answers.get("data") == data)
    for source in project.folder.rglob("*.py"):  # for the shared cache, which tells files apart by size and time
        source.touch()

    succeed(project.folder, "mypy", "--cache-dir", project.folder.parent.parent / "mypy-cache")


@pytest.mark.parametrize("data", [None, *KINDS], ids=str)
def test_a_project_runs_as_it_is_and_passes_its_own_tests(tmp_path: Path, data: str | None) -> None:
    """Without make or an installation: what an example needs is made at its first use."""
    baked = bake(tmp_path / "mine", data=data) if data else bake(tmp_path / "mine", "dp-prototype")
    project, path = baked.folder, {"PYTHONPATH": str(REPOSITORY)}
    experiments = sorted(file.relative_to(project) for file in (project / "experiments").glob("*.yaml"))

    assert succeed(project, "pipeline", "check", *experiments, **path).count(": ok\n") == len(experiments)
    launcher = "parallel.launcher=torchrun" if data else "parallel.launcher=inprocess"
    assert "quick test passed" in succeed(project, "pipeline", "run", experiments[0], "--quick", launcher, **path)
    if data == "image_folder":
        assert len(list((project / "data" / "images").glob("*/*.png"))) == 1797
    out = succeed(project, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not notebook", **path)
    assert re.search(r"^\d+ passed(, \d+ \w+)*(, \d+ warnings?)? in ", out, re.MULTILINE), out


DROPOUT = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, **_: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(256, 8), nn.Dropout(0.5), nn.Linear(8, 1))
"""
REGRESSION = """
import torch
from torch.utils.data import TensorDataset


def load(limit: int) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(limit, 1, 16, 16, generator=generator)
    data = TensorDataset(inputs, inputs.mean((1, 2, 3))[:, None])
    train, validation = torch.utils.data.random_split(data, [0.8, 0.2], generator=generator)
    return train, validation
"""


def test_tests_ask_the_experiment(tmp_path: Path) -> None:
    """With dropout, another loss and another metric."""
    project = bake(tmp_path / "churn")
    (project.folder / "src" / "churn" / "model.py").write_text(DROPOUT)
    (project.folder / "src" / "churn" / "data.py").write_text(REGRESSION)
    (project.folder / "tests" / "test_predict.py").unlink()  # of predict.py, which is for the images of before
    first = project.folder / "experiments" / "first.yaml"
    head, _, tail = first.read_text().partition("model:")
    first.write_text(f"{head}{OTHER}optimizer:{tail.partition('optimizer:')[2]}")

    out = succeed(project.folder, "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=str(REPOSITORY))

    assert "9 passed, 1 skipped" in out


OTHER = """\
model: {_target_: churn.model.Net}
data: {_target_: churn.data.load, limit: 100}
loss: {_target_: torch.nn.MSELoss}
metrics: {error: {_target_: torchmetrics.MeanSquaredError}}
"""


def test_an_example_table_has_the_columns_that_are_read(baked: tuple[Baked, ...], tmp_path: Path) -> None:
    project = next(project for project in baked if project.answers.get("data") == "table")
    path = {"PYTHONPATH": os.pathsep.join([str(project.folder / "src"), str(REPOSITORY)])}

    code = f"from {project.package}.data import example_table; example_table('table.csv')"
    succeed(tmp_path, sys.executable, "-c", code, **path)
    printed = succeed(tmp_path, sys.executable, "-m", f"{project.package}.data", tmp_path / "table.csv", **path)

    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 442
    source = (project.folder / "src" / project.package / "data.py").read_text()
    for name, mean, deviation in re.findall(r'"(\w+)": \((.+), (.+)\)', printed):
        (written,) = re.findall(rf'"{name}": \((.+), (.+)\)', source)
        assert [float(mean), float(deviation)] == pytest.approx([*map(float, written)], rel=0.05), name


@pytest.mark.parametrize("source", ["", "ddp-pipeline", "ddp-pipeline==0.1.0", "/no/such/folder"])
def test_a_source_that_a_package_index_could_answer_is_refused(baked: tuple[Baked, ...], source: str) -> None:
    done = command(baked[0].folder, "make", "install", f"PIPELINE_SOURCE={source}")

    assert done.returncode == 2
    assert f"error: PIPELINE_SOURCE is '{source}'; name a checkout of ddp-pipeline, or its repository" in done.stderr
    assert "make install PIPELINE_SOURCE=git+https://" in done.stderr
    assert not (baked[0].folder / ".venv").exists()


def test_nothing_committed_names_a_place_of_this_machine(baked: tuple[Baked, ...]) -> None:
    places = {str(REPOSITORY), str(Path.home()), str(baked[0].folder.parent), sys.prefix}
    for project in baked:
        assert (project.folder / "pipeline.mk").read_text() == f"PIPELINE_SOURCE ?= {REPOSITORY}\n"
        committed = set(git(project.folder, "ls-files").splitlines())
        assert committed == project.files() - {"pipeline.mk", SCHEMA}
        for name in committed:
            text = (project.folder / name).read_text()
            assert not [place for place in places if place in text], name
