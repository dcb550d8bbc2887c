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
from pipeline.commands import check
from pipeline.commands import new

KINDS = ("digits", "image_folder", "table", "text")
COMMON = {
    ".gitignore", "AGENTS.md", "Makefile", "README.md", "pipeline.local.mk", "pipeline.mk",
    "pyproject.toml",
}  # fmt: skip
DDP = COMMON | {
    ".github/workflows/test.yaml", "job.sbatch",
    "experiments/experiment.schema.json",
    *(f"experiments/{name}.yaml" for name in ("first", "scaling", "smoke")),
    *(
        f"tests/{name}.py"
        for name in ("conftest", "test_data", "test_experiments", "test_model", "test_predict", "test_training")
    ),
}
PROTOTYPE = COMMON | {
    "experiments/experiment.schema.json",
    *(f"experiments/{name}.yaml" for name in ("first", "smoke")),
    "notebooks/prototype.ipynb",
    *(f"tests/{name}.py" for name in ("conftest", "test_experiments", "test_notebook")),
}


def expected(project: Baked) -> set[str]:
    files = set(DDP if project.template == "ddp-project" else PROTOTYPE)
    files |= {f"src/{project.package}/{name}.py" for name in ("__init__", "data", "model")}
    if project.answers.get("docker") == "yes":
        files |= {".dockerignore", "docker/Dockerfile", "docker/compose.yaml"}
    if project.template == "ddp-project":
        files.add(f"src/{project.package}/predict.py")
    examples = {"image_folder": "images", "table": "table"}
    if (example := examples.get(project.answers.get("data", ""))) is not None:
        files.add(f"src/{project.package}/example_{example}.py")
    return files


def test_the_files_are_those(baked: tuple[Baked, ...]) -> None:
    assert len(baked) == 10
    for project in baked:
        assert project.files() == expected(project), project.answers


def test_no_template_marks_are_left(baked: tuple[Baked, ...]) -> None:
    mark = re.compile(r"(?<!\$)\{\{|\{%|\{#|cookiecutter\.")  # ${{ is the CI's
    for project in baked:
        for name in project.files():
            found = mark.search((project.folder / name).read_text())
            assert found is None, f"{project.folder / name}: {found}"


def test_files_end_in_one_newline_and_have_no_gaps(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        for name in project.files():
            text = (project.folder / name).read_text()
            assert re.search(r"[^\n]\n\Z", text), name
            assert not re.search(r"[ \t]\n", text), name
            assert "\n\n\n" not in text or name.endswith(".py"), name


def test_python_is_formatted_and_clean(baked: tuple[Baked, ...]) -> None:
    parent = baked[0].folder.parent

    succeed(parent, "ruff", "format", "--check", "--no-cache", ".")
    succeed(parent, "ruff", "check", "--no-cache", ".")


PROVIDED = {"pipeline", "conftest"}
"""Modules that no dependency of the project provides: installed before the project, or next to the tests."""
CALLED = {"pillow": "PIL", "scikit-learn": "sklearn"}


def test_what_a_project_imports_is_among_its_dependencies(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        toml = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]
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


def test_yaml_and_json_are_valid(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        for name in project.files():
            if name.endswith(".yaml"):
                yaml.safe_load((project.folder / name).read_text())
            if name.endswith((".json", ".ipynb")):
                json.loads((project.folder / name).read_text())


def test_editors_find_the_schema_of_every_experiment(baked: tuple[Baked, ...]) -> None:
    schema = (REPOSITORY / "experiments" / "experiment.schema.json").read_text()
    for project in baked:
        folder = project.folder / "experiments"
        assert (folder / "experiment.schema.json").read_text() == schema
        for path in folder.glob("*.yaml"):
            first, second = path.read_text().splitlines()[:2]
            assert first == "# yaml-language-server: $schema=experiment.schema.json"
            assert second == f"# pipeline run experiments/{path.name}"


def test_every_experiment_passes_the_check(baked: tuple[Baked, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for project in baked:
        monkeypatch.chdir(project.folder)
        monkeypatch.setattr(sys, "path", [str(project.folder / "src"), *sys.path])
        result = CliRunner().invoke(cli.app, ["check", "--no-data", *map(str, Path("experiments").glob("*.yaml"))])

        assert result.exit_code == 0, f"{project.folder} {project.answers}: {result.output}"


def test_a_prototypes_strategy_is_in_its_experiment(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        first = yaml.safe_load((project.folder / "experiments" / "first.yaml").read_text())
        assert first["parallel"]["strategy"] == project.answers.get("strategy", "ddp")


def test_types_of_models_and_data(baked: tuple[Baked, ...], tmp_path: Path) -> None:
    sources = [project.folder / "src" / project.package for project in baked]
    config = baked[0].folder / "pyproject.toml"

    succeed(tmp_path, "mypy", "--config-file", config, "--cache-dir", _cache(baked), *sources)


FORMS = [{}, *({"data": data} for data in KINDS)]  # the prototype has no data to choose
"""Answers with tests of their own."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()) or "prototype")
def test_types_of_a_whole_project(baked: tuple[Baked, ...], form: dict[str, str]) -> None:
    template = "ddp-project" if form else "dp-prototype"
    project = next(each for each in baked if each.template == template and form.items() <= each.answers.items())
    for source in project.folder.rglob("*.py"):  # for the shared cache, which tells files apart by size and time
        source.touch()

    succeed(project.folder, "mypy", "--cache-dir", _cache(baked))


def _cache(baked: tuple[Baked, ...]) -> str:
    return str(baked[0].folder.parent.parent / "mypy-cache")


@pytest.mark.parametrize("data", KINDS)
def test_a_project_passes_its_own_tests(tmp_path: Path, data: str) -> None:
    project = bake(tmp_path / "mine", data=data)
    path = os.pathsep.join([str(project.folder / "src"), str(REPOSITORY)])

    out = succeed(project.folder, "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=path)
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", out, re.MULTILINE), out


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


def test_tests_ask_the_experiment_and_run_in_a_project_that_is_not_installed(tmp_path: Path) -> None:
    """With dropout, another loss, another metric, and a package that only src/ has."""
    project = bake(tmp_path / "churn")
    (project.folder / "src" / "churn" / "model.py").write_text(DROPOUT)
    (project.folder / "src" / "churn" / "data.py").write_text(REGRESSION)
    (project.folder / "tests" / "test_predict.py").unlink()  # of predict.py, which is for the images of before
    for path in (project.folder / "experiments").glob("*.yaml"):
        text = path.read_text().replace("torch.nn.CrossEntropyLoss", "torch.nn.MSELoss")
        text = re.sub(r"  accuracy:\n.*\n.*\n.*\n", "  error:\n    _target_: torchmetrics.MeanSquaredError\n", text)
        path.write_text(text if "limit" in text else re.sub(r"(data:\n.*\n)", r"\1  limit: 100\n", text))

    out = succeed(project.folder, "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=str(REPOSITORY))

    assert "11 passed, 1 skipped" in out


def test_two_workers_find_a_package_that_is_not_installed(tmp_path: Path) -> None:
    project = bake(tmp_path / "churn")
    line = ("pytest", "-q", "-p", "no:cacheprovider", "tests/test_training.py")

    assert "3 passed" in succeed(project.folder, *line, PYTHONPATH=str(REPOSITORY))


@pytest.mark.parametrize("data", KINDS)
def test_a_project_runs_as_it_is(tmp_path: Path, data: str) -> None:
    """Without make: what an example needs is made at its first use."""
    project = bake(tmp_path / "mine", launcher="torchrun", data=data).folder
    path = {"PYTHONPATH": str(REPOSITORY)}
    experiments = sorted(file.relative_to(project) for file in (project / "experiments").glob("*.yaml"))

    assert succeed(project, "pipeline", "check", *experiments, **path).count(": ok\n") == 3
    assert "validation/loss" in succeed(project, "pipeline", "run", "experiments/first.yaml", "--quick", **path)
    if data == "image_folder":
        assert len(list((project / "data" / "images").glob("*/*.png"))) == 1797


def test_an_example_table_has_the_columns_that_are_read(baked: tuple[Baked, ...], tmp_path: Path) -> None:
    project = next(project for project in baked if project.answers.get("data") == "table")
    path = {"PYTHONPATH": os.pathsep.join([str(project.folder / "src"), str(REPOSITORY)])}

    code = f"from {project.package}.example_table import example_table; example_table('table.csv')"
    succeed(tmp_path, sys.executable, "-c", code, **path)
    printed = succeed(tmp_path, sys.executable, "-m", f"{project.package}.data", tmp_path / "table.csv", **path)

    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 442
    source = (project.folder / "src" / project.package / "data.py").read_text()
    for name, mean, deviation in re.findall(r'"(\w+)": \((.+), (.+)\)', printed):
        (written,) = re.findall(rf'"{name}": \((.+), (.+)\)', source)
        assert [float(mean), float(deviation)] == pytest.approx([*map(float, written)], rel=0.05), name


def test_a_source_that_a_package_index_could_answer_is_refused(baked: tuple[Baked, ...]) -> None:
    for source in ("ddp-pipeline", "ddp-pipeline==0.1.0", "/no/such/folder"):
        done = command(baked[0].folder, "make", "install", f"PIPELINE_SOURCE={source}")

        assert done.returncode == 2
        assert source in done.stderr
        assert "make install PIPELINE_SOURCE=git+https://" in done.stderr
        assert not (baked[0].folder / ".venv").exists()


def test_the_project_comes_from_this_checkout(baked: tuple[Baked, ...]) -> None:
    for project in baked:
        assert f"PIPELINE_SOURCE := {REPOSITORY}\n" in (project.folder / "pipeline.local.mk").read_text()
        assert "ddp-pipeline" not in re.sub(r"#.*", "", (project.folder / "pyproject.toml").read_text())


def test_nothing_committed_names_a_place_of_this_machine(baked: tuple[Baked, ...]) -> None:
    places = {str(REPOSITORY), str(Path.home()), str(baked[0].folder.parent), sys.prefix}
    for project in baked:
        committed = git(project.folder, "ls-files").splitlines()
        assert "pipeline.mk" in committed
        assert "pipeline.local.mk" not in committed
        for name in committed:
            text = (project.folder / name).read_text()
            assert not [place for place in places if place in text], name


def test_what_templates_run_is_the_same_in_each() -> None:
    """A hook has to stand alone, so each template has its own copy."""
    for file in ("hooks/pre_gen_project.py", "hooks/post_gen_project.py"):
        assert len({(new.root() / template / file).read_text() for template in new.names()}) == 1


def test_templates_share_what_they_have_in_common() -> None:
    """The prototype's data are a copy."""
    parts = REPOSITORY / "templates" / "ddp-project" / "templates"
    (source,) = (REPOSITORY / "templates" / "dp-prototype").glob("{{*/src/{{*")

    assert (source / "data.py").read_text() == (parts / "data" / "digits.py").read_text()


def test_hooks_are_clean() -> None:
    hooks = [str(path) for path in REPOSITORY.glob("templates/*/hooks")]

    succeed(REPOSITORY, "ruff", "check", "--no-cache", "--no-force-exclude", "--ignore", "S,T20,Q,D", *hooks)
