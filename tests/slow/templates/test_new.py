"""``pipeline new``: what it refuses, and what it leaves."""

# promise: all answers; the wheel

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baking import REPOSITORY, bake, command, git, succeed

from pipeline.errors import UsageError
from pipeline.commands import new
from pipeline.commands.new import create


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates that a test may break."""
    folder = Path(shutil.copytree(REPOSITORY / "templates", tmp_path / "templates"))
    monkeypatch.setattr(new, "root", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["dat=text"], "has no question dat; did you mean data?; its questions are project_name, data, docker"),
        (["data=txt"], "'txt' is not a choice; did you mean text?; choose one of digits, image_folder, table, text"),
        (["docker=maybe"], "choose one of no, yes"),
        (["data"], "write --set data=VALUE"),
        (["project_name=../up"], "project_name: '../up' is not a name; write letters"),
        (["project_name='''"], "is not a name; write letters"),
        (["project_name=class"], "project_name: 'class' can't be the name of its package"),
        (["project_name=torch"], "a package torch exists already; write another, for instance torch-experiments"),
        (["project_name=six"], "a package six exists already"),
        (["project_name=json"], "a package json exists already"),
        (["project_name=pipeline"], "a package pipeline exists already"),
        (["project_name=google"], "a package google exists already"),
    ],
)
def test_wrong_answers_name_what_is_allowed(tmp_path: Path, settings: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        create("ddp-project", tmp_path / "mine", settings, no_input=True)

    assert list(tmp_path.iterdir()) == []


def test_a_library_that_pip_installed_from_a_file_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "installed"
    (installed / "sparks").mkdir(parents=True)
    (installed / "sparks" / "__init__.py").touch()
    (installed / "sparks-1.0.dist-info").mkdir()
    (installed / "sparks-1.0.dist-info" / "METADATA").write_text("Name: sparks\nVersion: 1.0\n")
    (installed / "sparks-1.0.dist-info" / "direct_url.json").write_text('{"archive_info": {}, "url": "file:///sparks.whl"}')
    monkeypatch.syspath_prepend(installed)

    with pytest.raises(UsageError, match="a package sparks exists already"):
        create("ddp-project", tmp_path / "sparks", [], no_input=True)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        create("ddp-project", tmp_path / "mine", ["data=x", "nothing=1", "docker=x"], no_input=True)
    assert len(str(caught.value).splitlines()) == 3


def test_an_unknown_template_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean ddp-project\?; choose one of ddp-project, dp-prototype"):
        create("dpp-project", tmp_path / "mine", [], no_input=True)


def test_a_directory_that_is_not_empty_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")

    with pytest.raises(UsageError, match="exists and isn't empty; name another directory"):
        create("ddp-project", tmp_path / "mine", [], no_input=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_the_default_directory_is_not_touched_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create("ddp-project", None, [], no_input=True)

    with pytest.raises(UsageError, match="my-experiments: exists and isn't empty"):
        create("ddp-project", None, [], no_input=True)


def test_a_file_in_the_way_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")

    with pytest.raises(UsageError, match="is a file"):
        create("ddp-project", tmp_path / "mine", [], no_input=True)
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    assert bake(tmp_path / "mine").files() >= {"Makefile", "src/mine/model.py"}


def test_the_directory_names_the_project(tmp_path: Path) -> None:
    project = bake(tmp_path / "deep" / "Speech Models")

    assert (project.folder / "src" / "speech_models").is_dir()
    assert 'name = "speech-models"' in (project.folder / "pyproject.toml").read_text()


def test_it_is_a_git_repository_with_one_commit(tmp_path: Path) -> None:
    project = bake(tmp_path / "mine").folder

    assert git(project, "rev-list", "--count", "HEAD") == "1"
    assert git(project, "status", "--porcelain") == ""


def test_a_global_ignore_file_leaves_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ignored").write_text("*.md\n*.yaml\ntests/\n")
    (tmp_path / "config").write_text(f"[core]\n  excludesFile = {tmp_path / 'ignored'}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))

    project = bake(tmp_path / "mine")

    assert set(git(project.folder, "ls-files").splitlines()) == project.files() - {"pipeline.local.mk"}


def test_a_commit_that_fails_has_gits_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = tmp_path / "template" / "hooks" / "prepare-commit-msg"
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\necho tickets only >&2\nexit 1\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hook.parents[1]))

    assert create("ddp-project", tmp_path / "mine", [], no_input=True).warning == "git failed: tickets only"


def test_without_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    created = create("ddp-project", tmp_path / "mine", [], no_input=True)

    assert created.warning == "git isn't installed"
    assert not (tmp_path / "mine" / ".git").exists()


def test_inside_a_repository_it_adds_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")

    created = create("ddp-project", tmp_path / "mine", [], no_input=True)

    assert "lies in a git repository already" in created.warning
    assert not (tmp_path / "mine" / ".git").exists()


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        *((file, None) for file in ("cookiecutter.json", "ddp-project/cookiecutter.json")),
        *((file, None) for file in ("ddp-project/hooks/pre_gen_project.py", "ddp-project/templates/model/resnet.py")),
        *(("cookiecutter.json", text) for text in ("{", "[]", "{}", '{"templates": 1}')),
    ],
)
def test_a_broken_file_of_the_templates(templates: Path, tmp_path: Path, broken: str, text: str | None) -> None:
    (templates / broken).unlink() if text is None else (templates / broken).write_text(text)

    with pytest.raises(UsageError, match="the templates are broken") as refused:
        create("ddp-project", tmp_path / "mine", [], no_input=True)
    assert Path(broken).name in str(refused.value)
    assert not (tmp_path / "mine").exists()


def test_a_folder_of_templates_that_is_gone(templates: Path, tmp_path: Path) -> None:
    shutil.rmtree(templates)

    with pytest.raises(UsageError, match="install ddp-pipeline again or restore the file"):
        create("ddp-project", tmp_path / "mine", [], no_input=True)


def test_the_command_prints_the_next_commands(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "dp-prototype", str(tmp_path / "mine"), "--no-input", "--set", "strategy=single")

    assert ended.code == 0, ended.output
    assert re.search(r"Next:\n  cd \S+mine\n  pip install -e \.\n  pipeline run experiments/first\.yaml --quick\n", ended.stdout)


def test_the_command_shows_a_message_and_no_traceback(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "ddp-project", str(tmp_path / "mine"), "--no-input", "--set", "data=csv")

    assert ended.code == 2
    assert ended.stderr == (
        "error: --set data=csv: 'csv' is not a choice; choose one of digits, image_folder, table, text\n"
    )


@pytest.mark.parametrize(("data", "model"), [("digits", "ResNet"), ("table", "MLP"), ("text", "GPT")])
def test_the_model_takes_the_data(tmp_path: Path, data: str, model: str) -> None:
    project = bake(tmp_path / "mine", data=data).folder

    assert f"_target_: mine.model.{model}\n" in (project / "experiments" / "first.yaml").read_text()


def test_nobody_to_ask(tmp_path: Path) -> None:
    done = command_without_terminal(tmp_path, "new")

    assert done.returncode == 2
    assert "add --no-input" in done.stderr
    assert "Traceback" not in done.stderr


def test_questions_are_asked(tmp_path: Path) -> None:
    answers = ["2", "My Idea", "2"]  # template, project, strategy
    lines = "\\n".join(answers)
    out = succeed(tmp_path, "sh", "-c", f"printf '{lines}\\n' | {sys.executable} -m pipeline new", **CHECKOUT)

    assert "ddp-project (Train on several devices" in out
    assert "strategy: single" in (tmp_path / "my-idea" / "experiments" / "first.yaml").read_text()
    assert (tmp_path / "my-idea" / "src" / "my_idea").is_dir()


def test_a_folder_whose_name_is_taken_is_refused_before_the_questions(tmp_path: Path) -> None:
    line = f"printf '\\n\\n\\n\\n' | {sys.executable} -m pipeline new ddp-project torch"
    done = command(tmp_path, "sh", "-c", line, **CHECKOUT)

    assert done.returncode == 2
    assert "a package torch exists already" in done.stderr
    assert "Data to start with" not in done.stdout


def test_three_questions_are_asked(tmp_path: Path) -> None:
    assert list(new.questions(new.root() / "ddp-project")) == ["project_name", "data", "docker"]
    answers = ["1", "Rows", "3", ""]  # template, project, data, docker
    lines = "\\n".join(answers)
    out = succeed(tmp_path, "sh", "-c", f"printf '{lines}\\n' | {sys.executable} -m pipeline new", **CHECKOUT)

    assert "3 - table: rows of a CSV file" in out
    assert "_target_: rows.data.table" in (tmp_path / "rows" / "experiments" / "first.yaml").read_text()


def command_without_terminal(folder: Path, *arguments: str) -> Any:
    return command(folder, "sh", "-c", f"{sys.executable} -m pipeline {' '.join(arguments)} </dev/null", **CHECKOUT)


CHECKOUT = {"PYTHONPATH": str(REPOSITORY)}


class TestCookiecutter:
    """The same by cookiecutter itself."""

    @pytest.mark.parametrize("which", ["templates/ddp-project", "templates"])
    def test_from_the_folder(self, tmp_path: Path, which: str) -> None:
        nobody = {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
        line = ("cookiecutter", which, "--no-input", "-o", tmp_path)
        out = succeed(REPOSITORY, *line, PWD=str(REPOSITORY), **nobody)
        project = tmp_path / "my-experiments"

        assert "cd my-experiments\n  pip install -e .\n  pipeline run experiments/first.yaml --quick\n" in out
        assert f"PIPELINE_SOURCE := {REPOSITORY}\n" in (project / "pipeline.local.mk").read_text()
        assert git(project, "rev-list", "--count", "HEAD") == "1"
        assert git(project, "log", "--format=%an") == "ddp-pipeline"
        assert not (project / "docker").exists()

    def test_it_writes_what_pipeline_new_writes(self, tmp_path: Path) -> None:
        template = REPOSITORY / "templates" / "dp-prototype"
        succeed(tmp_path, "cookiecutter", template, "--no-input", HOME=str(tmp_path))
        ours = bake(tmp_path / "other" / "my-prototype", "dp-prototype")

        for name in ours.files() | {".git/HEAD"}:
            assert (tmp_path / "my-prototype" / name).read_text() == (ours.folder / name).read_text(), name

    def test_a_name_that_is_taken_leaves_nothing(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        home.mkdir()
        template = REPOSITORY / "templates" / "ddp-project"
        done = command(tmp_path, "cookiecutter", template, "--no-input", "project_name=torch", HOME=str(home))

        assert done.returncode == 1
        assert "error: project_name: a package torch exists already; write another" in done.stderr
        assert list(tmp_path.iterdir()) == [home]

    def test_cruft_updates_a_project(self, tmp_path: Path) -> None:
        """With the commands of the project's README."""
        checkout = tmp_path / "checkout"
        shutil.copytree(REPOSITORY / "templates", checkout / "templates")
        (checkout / "pyproject.toml").write_text('[project]\nname = "ddp-pipeline"\n')
        git(checkout, "init", "--quiet")
        commit(checkout)
        first = git(checkout, "rev-parse", "HEAD")
        project = bake(tmp_path / "mine", data="table").folder
        with (project / "README.md").open("a") as file:
            file.write("\nMy own notes.\n")
        (makefile,) = checkout.glob("templates/ddp-project/{{*/Makefile")
        makefile.write_text(makefile.read_text().replace("## Run the tests", "## Run all tests"))
        commit(checkout)

        answers = "\\n".join(["mine", "3", "", first])  # project, data, docker, commit
        link = f"{sys.executable} -m cruft link {checkout} --directory templates/ddp-project"
        succeed(project, "sh", "-c", f"printf '{answers}\\n' | {link}", HOME=str(tmp_path))
        commit(project)
        where = {"HOME": str(tmp_path), "PYTHONPATH": str(project / "src")}  # as after pip install --editable
        succeed(project, "cruft", "update", "--skip-apply-ask", **where)

        assert "## Run all tests" in (project / "Makefile").read_text()
        assert (project / "README.md").read_text().endswith("\nMy own notes.\n")
        changed = {line.split()[-1] for line in git(project, "status", "--porcelain").splitlines()}
        assert changed == {".cruft.json", "Makefile"}


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A change")
