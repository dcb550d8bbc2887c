"""As users have it: a project installed in an environment of its own, and the templates in an installed wheel."""

# promise: all answers; the wheel

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from baking import REPOSITORY, Baked, bake, succeed
from nbclient import NotebookClient


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Baked:
    """The default project in a new environment, which borrows what is heavy from the one that runs the tests."""
    project = bake(tmp_path_factory.mktemp("users") / "first-steps")
    environment(project.folder)
    return project


def environment(project: Path) -> None:
    """What `make install` does, without fetching anything."""
    install(project, "--editable", project, "--editable", REPOSITORY)
    (project / ".venv" / ".installed").touch()


def install(folder: Path, *what: str | Path) -> Path:
    """Install into a new environment in a folder; returns the environment's programs."""
    succeed(folder, "venv", ".venv", "--without-pip")
    programs = folder / ".venv" / "bin"
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    offline = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    succeed(folder, "pip", "--python", programs / "python", "install", *offline, *what)
    return programs


def test_the_commands_of_a_new_project(installed: Baked) -> None:
    """By make, and without it in the environment that has pipeline."""
    project, pipeline = installed.folder, installed.folder / ".venv" / "bin" / "pipeline"
    assert "make run " in succeed(project, "make", "help")
    assert succeed(project, pipeline, "check", "experiments/first.yaml") == "experiments/first.yaml: ok\n"
    assert "11 passed" in succeed(project, "make", "test")

    assert "validation/accuracy" in succeed(project, pipeline, "run", "experiments/smoke.yaml")
    assert list((project / "runs").glob("*-first-steps-smoke-*"))
    assert (project / "mlflow.db").is_file()


@pytest.mark.filterwarnings("ignore:Proactor event loop")
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = bake(tmp_path / "idea", "dp-prototype")
    monkeypatch.setenv("PYTHONPATH", f"{project.folder / 'src'}:{REPOSITORY}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(project.folder / "notebooks" / "prototype.ipynb", as_version=4)

    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(project.folder / "notebooks")}})
    done = client.execute()

    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")  # no bars of downloads
    assert re.search(r"validation accuracy 0\.\d+", printed)
    assert re.search(r"^\d \(\d+%\)$", printed, re.MULTILINE)  # the answer for new data
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_one_line_to_ddp_passes_the_check(tmp_path: Path) -> None:
    """The line that README, notebook and experiment show."""
    project = bake(tmp_path / "idea", "dp-prototype").folder
    line = "{strategy: ddp, launcher: ray, workers: 2}"
    for name in ("README.md", "notebooks/prototype.ipynb", "experiments/first.yaml"):
        assert line in (project / name).read_text()
    first = project / "experiments" / "first.yaml"
    first.write_text(first.read_text().replace("{strategy: dp, launcher: inprocess}", line))

    path = f"{project / 'src'}:{REPOSITORY}"
    out = succeed(project, "pipeline", "run", first, "--dry-run", "parallel.cpus_per_worker=1", PYTHONPATH=path)
    assert "launcher: ray\n  workers: 2\n" in out


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed wheel: its files in a folder of their own."""
    folder = tmp_path_factory.mktemp("wheel")
    succeed(REPOSITORY, "hatchling", "build", "--target", "wheel", "--directory", folder)
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "site")
    return folder / "site"


def test_a_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    """In an environment and a folder that know nothing of the checkout."""
    (file,) = wheel.parent.glob("*.whl")
    experiment = shutil.copy(REPOSITORY / "experiments" / "mlp.yaml", tmp_path)
    pipeline = install(tmp_path, file) / "pipeline"
    where = succeed(tmp_path, pipeline.with_name("python"), "-c", "import pipeline; print(pipeline.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / ".venv")

    version = succeed(tmp_path, pipeline, "--version").splitlines()
    alone = ("parallel.launcher=inprocess", "parallel.strategy=single", "parallel.workers=1", "train.epochs=1")
    document = json.loads(succeed(tmp_path, pipeline, "run", experiment, *alone, "--no-baseline", "--json"))
    listed = json.loads(succeed(tmp_path, pipeline, "list", "--json"))

    assert re.fullmatch(r"pipeline \d+\.\d+\.\d+\S*", version[0])  # no commit: this is no checkout
    assert {one["key"]: one["value"] for one in document["facts"]}["validation/accuracy"] > 0
    assert [run["run"] for run in listed] == [document["run"]]
    assert "properties" in json.loads(succeed(tmp_path, pipeline, "schema"))


def test_the_wheel_carries_its_license(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info")
    assert (metadata / "licenses" / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0\n" in (metadata / "METADATA").read_text()


def test_the_templates_are_in_the_wheel(wheel: Path) -> None:
    source = REPOSITORY / "templates"
    inside = wheel / "pipeline" / "_templates"

    assert files_in(inside) == files_in(source)
    assert (inside / "dp-prototype" / "hooks" / "post_gen_project.py").is_file()  # a link in the checkout


def files_in(folder: Path) -> set[Path]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path.parts}


def test_pipeline_new_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    succeed(tmp_path, "pipeline", "new", "dp-prototype", "mine", "--no-input", PYTHONPATH=str(wheel))
    project = tmp_path / "mine"

    assert (project / "src" / "mine" / "model.py").is_file()
    assert (project / "pipeline.mk").read_text() == "PIPELINE_SOURCE ?=\n"


def test_pipeline_new_from_a_wheel_whose_origin_pip_noted(wheel: Path, tmp_path: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info")
    noted = metadata / "direct_url.json"
    notes = {
        '{"url": "https://example.com/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}':
            "git+https://example.com/p.git@abc",
        '{"url": "file:///home/me/my%20pipeline", "dir_info": {}}': "/home/me/my pipeline",
        '{"url": "file:///home/me/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}':
            "git+file:///home/me/p.git@abc",
    }  # fmt: skip
    for number, (note, source) in enumerate(notes.items()):
        noted.write_text(note)
        try:
            succeed(tmp_path, "pipeline", "new", "dp-prototype", f"p{number}", "--no-input", PYTHONPATH=str(wheel))
        finally:
            noted.unlink()

        assert (tmp_path / f"p{number}" / "pipeline.mk").read_text() == f"PIPELINE_SOURCE ?= {source}\n"
