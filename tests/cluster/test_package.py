"""What is sent to a cluster, and what is refused before anything is sent."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from projects import project

from pipeline.errors import ExperimentError, ResourceError
from pipeline.launch.cluster import code as shipping
from pipeline.launch.cluster.code import Code, sent, to_send, tracked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that git tracks, as the working directory."""
    folder = project(tmp_path / "project", tracked=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "lab", raising=False)  # that of another test: it would be looked for there
    return folder


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_tracked_files_go_as_they_are_in_the_working_tree(here: Path) -> None:
    (here / "lab.yaml").write_text("changed since")
    (here / "pyproject.toml").unlink()
    (here / "secret.env").write_text("key")
    (here / ".gitignore").write_text("lab.py\n")
    subprocess.run(["git", "add", ".gitignore"], check=True)

    package = tracked(here)
    with shipping.staged(package) as folder:
        assert contents(folder) == {"lab.py", "lab.yaml"}  # the .gitignore would have Ray leave out lab.py
        assert (folder / "lab.yaml").read_text() == "changed since"
    assert not folder.exists()
    assert package.total_bytes == sum((here / path).stat().st_size for path in package.files)


def test_a_link_to_a_folder_takes_nothing_along(here: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").touch()
    (here / "data").symlink_to(tmp_path / "data")
    subprocess.run(["git", "add", "data"], check=True)

    assert Path("data") not in tracked(here).files


def test_a_folder_of_a_larger_repository_goes_alone(here: Path) -> None:
    (here / "one").mkdir()
    (here / "one" / "two.txt").write_text("12")
    subprocess.run(["git", "add", "one"], check=True)

    assert str(tracked(here / "one")) == "1 file, 2 bytes"


def test_code_that_git_does_not_track_is_named(here: Path) -> None:
    (here / "lab.py").unlink()
    (here / "lab").mkdir()
    (here / "lab" / "__init__.py").touch()
    subprocess.run(["git", "add", "lab"], check=True)
    (here / "lab" / "more.py").touch()
    importlib.invalidate_caches()

    assert tracked(here).untracked_code == (Path("lab/more.py"),)


def test_a_package_of_which_git_tracks_nothing_is_refused(here: Path) -> None:
    subprocess.run(["git", "rm", "--quiet", "--cached", "lab.py"], check=True)

    with pytest.raises(ResourceError, match=r"git does not track lab.py, which .* lists.* Use git add lab.py\."):
        tracked(here)


def test_without_a_repository_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ResourceError, match=r"not in a git repository.*Use git init and git add\."):
        tracked(tmp_path)


def test_an_empty_repository_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    with pytest.raises(ResourceError, match=r"git tracks no file here.*Use git add\."):
        tracked(tmp_path)


def test_too_much_is_refused_with_the_largest_files(here: Path) -> None:
    (here / "weights.bin").write_bytes(bytes(70_000))
    subprocess.run(["git", "add", "weights.bin"], check=True)

    with pytest.raises(ResourceError, match=r"At most 60 kB .* The largest files are weights.bin \(70 kB\), lab.py"):
        tracked(here, most_bytes=60_000)


def test_only_a_project_with_packages_of_its_own_is_sent(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_send(joined=True) is not None
    assert to_send(joined=False) is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://package.zip"}}')
    assert to_send(joined=True) is None  # it came with the job
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    (here / "pyproject.toml").write_text("[tool.pipeline]\n")
    assert to_send(joined=True) is None


def test_a_worker_finds_a_source_folder_and_the_working_directory(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As generated projects have it: the package in src/, started from anywhere in the project."""
    (here / "src").mkdir()
    (here / "lab.py").rename(here / "src" / "lab_src.py")
    (here / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["lab_src"]\n')
    (here / "experiments").mkdir()
    (here / "experiments" / "one.yaml").touch()
    subprocess.run(["git", "add", "--all"], check=True)
    monkeypatch.syspath_prepend(here / "src")
    monkeypatch.chdir(here / "experiments")

    with sent(to_send(joined=True), joined=True) as (code, runtime_env):
        assert code == Code(folder="experiments", paths=("src",), packages=("lab_src",))
        assert contents(Path(runtime_env["working_dir"])) == {
            *("lab.yaml", "pyproject.toml", "src/lab_src.py", "experiments/one.yaml")
        }
        monkeypatch.chdir(runtime_env["working_dir"])  # as Ray does it
        environment = {**os.environ, "PYTHONPATH": str(Path(shipping.__file__).parents[1])}
        found = subprocess.run(
            [sys.executable, "-c", _ENTER, code.model_dump_json()], env=environment, capture_output=True, text=True
        )
    assert capfd.readouterr().err.startswith("sending 4 files, ")
    assert found.stdout.split() == ["experiments", "src"], found.stderr


_ENTER = """
import importlib.util, pathlib, sys
from pipeline.launch.cluster.code import Code
Code.model_validate_json(sys.argv[1]).enter()
print(pathlib.Path.cwd().name, pathlib.Path(importlib.util.find_spec("lab_src").origin).parent.name)
"""


def test_a_placement_is_refused_elsewhere() -> None:
    from pipeline.experiment.load import load

    overrides = ["parallel.placement=spread", "parallel.launcher=torchrun"]
    with pytest.raises(ExperimentError, match=r"has no effect with launcher: torchrun\. Set launcher: ray"):
        load(Path(__file__).parents[1] / "project" / "lab.yaml", overrides)
