"""Template updates: generate, change the template, update; what the user wrote survives."""

# promise: all answers; `--update`; the wheel

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baking import REPOSITORY, bake, git, succeed

from pipeline.errors import UsageError
from pipeline.commands.new import catalog
from pipeline.commands.new.update import Updated, update

MAKEFILE = "ddp-project/{{cookiecutter.__project_slug}}/Makefile"
README = "ddp-project/{{cookiecutter.__project_slug}}/README.md"
METADATA = ".cruft.json"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the templates, that a test may change."""
    folder = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "templates", folder / "templates")
    (folder / "pyproject.toml").write_text('[project]\nname = "ddp-pipeline"\n')
    git(folder, "init", "--quiet")
    commit(folder)
    monkeypatch.setattr(catalog, "root", lambda: folder / "templates")
    return folder


@pytest.fixture
def project(checkout: Path, tmp_path: Path) -> Path:
    """A project with a change of the user's own."""
    folder = bake(tmp_path / "mine").folder
    with (folder / "README.md").open("a") as file:
        file.write("\nMy own notes.\n")
    (folder / "experiments" / "mine.yaml").write_text("name: mine\n")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A change")


def change(checkout: Path, file: str, old: str, new: str) -> None:
    path = checkout / "templates" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    commit(checkout)


def change_template(checkout: Path) -> None:
    change(checkout, MAKEFILE, "## Run the tests", "## Run all tests")
    (checkout / "templates" / MAKEFILE).with_name("NEWS.md").write_text("# News of {{ cookiecutter.__package_name }}\n")
    commit(checkout)


def test_nothing_to_do(project: Path) -> None:
    before = git(project, "rev-parse", "HEAD")

    assert update(project, []) == Updated((), ())
    assert git(project, "rev-parse", "HEAD") == before


def test_both_sides_survive(checkout: Path, project: Path) -> None:
    change_template(checkout)

    updated = update(project, [])

    assert set(updated.files) == {METADATA, "Makefile", "NEWS.md"}
    assert updated.conflicts == ()
    assert "## Run all tests" in (project / "Makefile").read_text()
    assert (project / "NEWS.md").read_text() == "# News of mine\n"
    assert (project / "README.md").read_text().endswith("\nMy own notes.\n")
    assert (project / "experiments" / "mine.yaml").is_file()
    assert git(project, "status", "--porcelain") == ""
    state = json.loads((project / METADATA).read_text())
    assert state["commit"] == git(checkout, "rev-parse", "HEAD")


def test_a_second_update_builds_on_the_first(checkout: Path, project: Path) -> None:
    change_template(checkout)
    update(project, [])
    (project / "NEWS.md").unlink()
    commit(project)
    change(checkout, MAKEFILE, "## Run all tests", "## Run every test")

    updated = update(project, [])

    assert set(updated.files) == {METADATA, "Makefile"}
    assert "## Run every test" in (project / "Makefile").read_text()
    assert not (project / "NEWS.md").exists()  # what the user removed stays away
    assert update(project, []) == Updated((), ())


def test_an_update_in_a_clone(checkout: Path, project: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    change_template(checkout)

    update(tmp_path / "clone", [])

    assert (tmp_path / "clone" / "README.md").read_text().endswith("\nMy own notes.\n")
    assert (tmp_path / "clone" / "NEWS.md").is_file()


def test_conflicts_are_shown_and_nothing_is_lost(checkout: Path, project: Path) -> None:
    makefile = project / "Makefile"
    makefile.write_text(makefile.read_text().replace("## Run the tests", "## Run my tests"))
    commit(project)
    before = git(project, "rev-parse", "HEAD")
    change_template(checkout)

    updated = update(project, [])

    assert updated.conflicts == ("Makefile",)
    text = makefile.read_text()
    assert "<<<<<<<" in text
    assert "## Run my tests" in text
    assert "## Run all tests" in text
    git(project, "merge", "--abort")
    assert git(project, "rev-parse", "HEAD") == before
    assert "## Run my tests" in makefile.read_text()
    assert git(project, "status", "--porcelain") == ""


def test_other_answers(project: Path) -> None:
    updated = update(project, ["docker=yes", "workers=4"])

    assert "docker/Dockerfile" in updated.files
    assert "workers: 4" in (project / "experiments" / "first.yaml").read_text()
    assert json.loads((project / METADATA).read_text())["context"]["cookiecutter"]["__workers"] == "4"
    assert (project / "README.md").read_text().endswith("My own notes.\n")


def test_where_the_pipeline_comes_from_is_kept(checkout: Path, project: Path) -> None:
    (checkout / "pyproject.toml").unlink()  # now the template's origin can't be found out
    change_template(checkout)

    updated = update(project, [])

    assert "pipeline.mk" not in updated.files
    assert f"PIPELINE_SOURCE := {checkout}\n" in (project / "pipeline.local.mk").read_text()


def test_a_project_that_has_committed_its_path_keeps_it_to_itself(checkout: Path, project: Path) -> None:
    """As those of before have."""
    (project / "pipeline.mk").write_text(f"PIPELINE_SOURCE := {checkout}\n")
    (project / "pipeline.local.mk").unlink()
    commit(project)
    change_template(checkout)

    update(project, [])

    assert f"PIPELINE_SOURCE := {checkout}\n" in (project / "pipeline.local.mk").read_text()
    assert git(project, "ls-files", "pipeline.local.mk") == ""


def test_uncommitted_changes_are_refused(checkout: Path, project: Path) -> None:
    (project / "README.md").write_text("not committed")
    change_template(checkout)

    with pytest.raises(UsageError, match="has uncommitted changes; commit or stash them first"):
        update(project, [])
    assert (project / "README.md").read_text() == "not committed"


def test_an_untracked_file_in_the_way_is_not_overwritten(checkout: Path, project: Path) -> None:
    (project / "NEWS.md").write_text("mine")
    change_template(checkout)

    with pytest.raises(UsageError, match=r"git can't merge the template: .*NEWS\.md"):
        update(project, [])
    assert (project / "NEWS.md").read_text() == "mine"


def test_an_amended_first_commit_is_refused(checkout: Path, tmp_path: Path) -> None:
    project = bake(tmp_path / "other").folder
    (project / "README.md").write_text("in the first commit")
    git(project, "commit", "--quiet", "--all", "--amend", "--no-edit")
    change_template(checkout)

    with pytest.raises(UsageError, match=r"was amended: .* your changes in it would be lost; try `cruft update`"):
        update(project, [])


def test_a_rewritten_history_is_refused(project: Path) -> None:
    git(project, "checkout", "--quiet", "--orphan", "fresh")
    commit(project)

    with pytest.raises(UsageError, match="its history was rewritten; try `cruft update`"):
        update(project, [])


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run this in a project that was generated from a template"):
        update(tmp_path, [])


def test_broken_metadata(project: Path) -> None:
    (project / METADATA).write_text("{}")

    with pytest.raises(UsageError, match="restore it from git"):
        update(project, [])


def test_answers_that_are_not_allowed_any_more(checkout: Path, project: Path) -> None:
    questions = "ddp-project/cookiecutter.json"
    change(checkout, questions, '      "ray": "Ray Train: this machine or a cluster",\n', "")
    change(checkout, questions, '"launcher": "ray"', '"launcher": "torchrun"')

    with pytest.raises(UsageError, match="'ray' is not a choice; choose one of torchrun, inprocess"):
        update(project, [])
    update(project, ["launcher=torchrun"])
    assert "launcher: torchrun" in (project / "experiments" / "first.yaml").read_text()


def test_the_command(
    command: Callable[..., Any], checkout: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(checkout, README, "# {{ cookiecutter.project_name }}", "# The {{ cookiecutter.project_name }}")
    readme = project / "README.md"
    readme.write_text(readme.read_text().replace("# mine", "# Mine"))
    commit(project)
    monkeypatch.chdir(project)

    ended = command("new", "--update")

    assert ended.code == 1
    assert "conflict  README.md" in ended.stdout
    assert "git merge --abort" in ended.stdout


def test_cruft_itself(checkout: Path, project: Path, tmp_path: Path) -> None:
    change_template(checkout)
    state = json.loads((project / METADATA).read_text())
    (project / METADATA).write_text(json.dumps(state | {"template": str(checkout)}))  # as its user names it
    commit(project)

    succeed(project, "cruft", "update", "--skip-apply-ask", HOME=str(tmp_path))

    assert "## Run all tests" in (project / "Makefile").read_text()
    assert (project / "NEWS.md").is_file()
    assert (project / "README.md").read_text().endswith("\nMy own notes.\n")
    assert json.loads((project / METADATA).read_text())["commit"] == git(checkout, "rev-parse", "HEAD")
    changed = {line.split()[-1] for line in git(project, "status", "--porcelain").splitlines()}
    assert changed == {METADATA, "Makefile", "NEWS.md"}


def test_a_project_that_cruft_created(checkout: Path, tmp_path: Path) -> None:
    line = ("cruft", "create", checkout, "--directory", "templates/ddp-project", "--no-input")
    succeed(tmp_path, *line, HOME=str(tmp_path))
    project = tmp_path / "my-experiments"
    git(project, "init", "--quiet")
    commit(project)
    change_template(checkout)

    succeed(project, "cruft", "update", "--skip-apply-ask", HOME=str(tmp_path))

    assert f"PIPELINE_SOURCE := {checkout}\n" in (project / "pipeline.local.mk").read_text()
    assert (project / "NEWS.md").is_file()
