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

from pipeline.commands import new
from pipeline.commands.new import create
from pipeline.errors import PipelineError, UsageError

CHECKOUT = {"PYTHONPATH": str(REPOSITORY)}


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
    with pytest.raises(PipelineError, match=re.escape(said)):
        create("ddp-project", tmp_path / "mine", settings, no_input=True)

    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        create("ddp-project", tmp_path / "mine", ["data=x", "nothing=1", "docker=x"], no_input=True)
    assert len(caught.value.messages) == 3
    assert all(message.startswith("--set ") for message in caught.value.messages)


def test_an_unknown_template_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean ddp-project\?; choose one of ddp-project, dp-prototype"):
        create("dpp-project", tmp_path / "mine", [], no_input=True)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("mine", "mine: exists and isn't empty; name another directory"),
        ("mine/thesis.tex", "is a file"),
        (None, "mine"),
    ],
)
def test_what_is_there_is_not_touched(
    folder: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=said):
        create("ddp-project", Path(folder) if folder else None, ["project_name=mine"], no_input=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    assert bake(tmp_path / "mine").files() >= {"Makefile", "src/mine/model.py"}


def test_the_directory_names_the_project(tmp_path: Path) -> None:
    project = bake(tmp_path / "deep" / "Speech Models")

    assert (project.folder / "src" / "speech_models").is_dir()
    assert 'name = "speech-models"' in (project.folder / "pyproject.toml").read_text()


def test_it_is_a_git_repository_with_one_commit_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global ignore file leaves nothing out."""
    (tmp_path / "ignored").write_text("*.md\n*.yaml\ntests/\n")
    (tmp_path / "config").write_text(f"[core]\n  excludesFile = {tmp_path / 'ignored'}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))

    project = bake(tmp_path / "mine")

    assert git(project.folder, "rev-list", "--count", "HEAD") == "1"
    assert git(project.folder, "status", "--porcelain") == ""
    of_this_machine = {"pipeline.mk", "experiments/experiment.schema.json"}
    assert set(git(project.folder, "ls-files").splitlines()) == project.files() - of_this_machine


def test_a_commit_that_fails_has_gits_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = tmp_path / "template" / "hooks" / "prepare-commit-msg"
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\necho tickets only >&2\nexit 1\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(hook.parents[1]))

    assert create("ddp-project", tmp_path / "mine", [], no_input=True).warning == "git failed: tickets only"


@pytest.mark.parametrize("reason", ["git isn't installed", "lies in a git repository already"])
def test_where_there_can_be_no_commit_it_says_so(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "already" in reason:
        git(tmp_path, "init", "--quiet")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))

    assert create("ddp-project", tmp_path / "mine", [], no_input=True).warning.endswith(reason)
    assert not (tmp_path / "mine" / ".git").exists()


def test_the_command_prints_the_next_commands(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "dp-prototype", str(tmp_path / "all mine"), "--no-input", "--set", "strategy=single")

    assert ended.code == 0, ended.output
    assert re.search(
        r"Next:\n  cd '\S+all mine'\n  pip install -e \.\n  pipeline run experiments/first\.yaml --quick\n", ended.stdout
    )


def test_the_command_shows_a_message_and_no_traceback(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "ddp-project", str(tmp_path / "mine"), "--no-input", "--set", "data=csv")

    assert ended.code == 2
    assert ended.stderr == (
        "error: --set data=csv: 'csv' is not a choice; choose one of digits, image_folder, table, text\n"
    )


def answer(folder: Path, answers: str, *arguments: str) -> Any:
    """``pipeline new`` with what is typed."""
    line = f"printf '{answers}' | {sys.executable} -m pipeline new {' '.join(arguments)}"
    return command(folder, "sh", "-c", line, **CHECKOUT)


@pytest.mark.parametrize(
    ("answers", "shown", "made"),
    [
        (r"1\nMy Rows\n3\n\n", "3 - table: rows of a CSV file", "_target_: my_rows.data.table"),  # template, name, data
        (r"2\nMy Rows\n2\n", "ddp-project (Train on several devices", "strategy: single"),
    ],
)
def test_questions_are_asked(answers: str, shown: str, made: str, tmp_path: Path) -> None:
    done = answer(tmp_path, answers)

    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert made in (tmp_path / "my-rows" / "experiments" / "first.yaml").read_text()
    assert (tmp_path / "my-rows" / "src" / "my_rows").is_dir()


def test_without_answers_it_names_the_option(tmp_path: Path) -> None:
    done = answer(tmp_path, "")

    assert done.returncode == 2
    assert "add --no-input" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_whose_name_is_taken_is_refused_before_the_questions(tmp_path: Path) -> None:
    done = answer(tmp_path, r"\n\n\n\n", "ddp-project", "torch")

    assert done.returncode == 2
    assert "a package torch exists already" in done.stderr
    assert "Data to start with" not in done.stdout


class TestCookiecutter:
    """The same by cookiecutter itself."""

    @pytest.mark.parametrize("which", ["templates/ddp-project", "templates"])
    def test_from_the_folder(self, tmp_path: Path, which: str) -> None:
        nobody = {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
        line = ("cookiecutter", which, "--no-input", "-o", tmp_path)
        out = succeed(REPOSITORY, *line, PWD=str(REPOSITORY), **nobody)
        project = tmp_path / "my-experiments"

        assert "cd my-experiments\n  pip install -e .\n  pipeline run experiments/first.yaml --quick\n" in out
        assert git(project, "log", "--format=%an") == "ddp-pipeline"

    @pytest.mark.parametrize(
        ("template", "answers"),
        [("ddp-project", {}), ("ddp-project", {"data": "table", "docker": "yes"}), ("dp-prototype", {})],
    )
    def test_it_writes_what_pipeline_new_writes(self, template: str, answers: dict[str, str], tmp_path: Path) -> None:
        given = [f"{key}={value}" for key, value in {"project_name": "mine", **answers}.items()]
        folder = REPOSITORY / "templates" / template
        succeed(tmp_path, "cookiecutter", folder, "--no-input", *given, HOME=str(tmp_path))
        ours = bake(tmp_path / "other" / "mine", template, **answers)
        theirs = ours._replace(folder=tmp_path / "mine")

        assert theirs.files() == ours.files()
        for name in ours.files() | {".git/HEAD", ".git/COMMIT_EDITMSG"}:
            assert (theirs.folder / name).read_text() == (ours.folder / name).read_text(), name

    def test_where_pipeline_is_missing_make_install_writes_the_schema(self, tmp_path: Path) -> None:
        (tmp_path / "pipeline.py").write_text("raise ImportError")
        template = REPOSITORY / "templates" / "ddp-project"
        succeed(tmp_path, "cookiecutter", template, "--no-input", HOME=str(tmp_path), PYTHONPATH=str(tmp_path))
        project = tmp_path / "my-experiments"

        assert git(project, "status", "--porcelain") == ""
        assert not (project / "experiments" / "experiment.schema.json").exists()
        schema = ".venv/bin/pipeline schema > experiments/experiment.schema.json\n"
        assert schema in succeed(project, "make", "--dry-run", "install")

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
        shutil.copytree(REPOSITORY / "templates", checkout / "templates", symlinks=True)
        git(checkout, "init", "--quiet")
        commit(checkout)
        first = git(checkout, "rev-parse", "HEAD")
        project = bake(tmp_path / "mine", "dp-prototype").folder
        with (project / "README.md").open("a") as file:
            file.write("\nMy own notes.\n")
        (makefile,) = checkout.glob("templates/ddp-project/{{*/Makefile")  # the prototype's is a link to it
        makefile.write_text(makefile.read_text().replace("## Run the tests", "## Run all tests"))
        commit(checkout)

        answers = "\\n".join(["mine", "1", first])  # project, strategy, commit
        link = f"{sys.executable} -m cruft link {checkout} --directory templates/dp-prototype"
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
