"""``pipeline new``: what it refuses, and what it leaves."""

# promise: all answers; `--update`; the wheel

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baking import REPOSITORY, bake, command, git, succeed

from pipeline.errors import UsageError
from pipeline.commands.new import catalog
from pipeline.commands.new.create import create
from pipeline.commands.new.update import update


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates that a test may break."""
    folder = Path(shutil.copytree(REPOSITORY / "templates", tmp_path / "templates"))
    monkeypatch.setattr(catalog, "root", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["modle=resnet"], "has no question modle; did you mean model?; its questions are project_name, task, data, model, launcher; its settings are package_name, length, strategy"),
        (
            ["model=resnett"],
            "'resnett' is not a choice; did you mean resnet?; choose one of resnet, transformer, mlp, pretrained, dcgan, own",
        ),
        (["data=mnist"], "choose one of digits, cifar10, image_folder, table, table_classes, text, text_classes, own"),
        (["strategy=fsdp"], "choose one of ddp, dp, single"),
        (["launcher=slurm"], "choose one of ray, torchrun, inprocess"),
        (["precision=int8"], "choose one of fp32, bf16, fp16, fp64"),
        (["docker=maybe"], "choose one of no, yes"),
        (["model"], "write --set model=VALUE"),
        (["data=text", "model=resnet"], "model: resnet doesn't take text; write transformer or own"),
        (["data=table", "model=transformer"], "model: transformer doesn't take table; write mlp or own"),
        (["data=text", "model=mlp"], "model: mlp doesn't take text; write transformer or own"),
        (["data=text_classes"], "data: supervised doesn't take text_classes; write digits or cifar10 or "),
        (["data=text_classes"], "or text, or task finetune"),
        (["task=gan", "data=digits"], "data: gan doesn't take digits; write image_folder, or task supervised or contrastive"),
        (["task=finetune", "model=own"], "model: own for finetune doesn't take text_classes; write pretrained, or another"),
        (["task=gan", "strategy=dp"], "strategy: gan doesn't run with dp, because dp calls the whole model, not its parts"),
        (["task=finetune", "strategy=dp"], "strategy: finetune doesn't run with dp, because each GPU's model would return"),
        (["workers=0"], "workers: '0' is not a number of workers; write 1 to 9999"),
        (["workers=two"], "workers: 'two' is not a number of workers; write 1 to 9999"),
        (["strategy=dp", "workers=2"], "workers: 2, but dp is one process; write 1, or strategy ddp"),
        (["launcher=inprocess", "workers=2"], "write 1, or launcher ray or torchrun"),
        (["mlflow_store=./mlruns"], "write sqlite:///FILE or a server's address"),
        (["mlflow_store=http://host/${oc.env:HOME}"], "write sqlite:///FILE or a server's address"),
        (["project_name=../up"], "project_name: '../up' is not a name; write letters"),
        (["project_name='''"], "is not a name; write letters"),
        (["package_name=My-Package"], "package_name: 'My-Package' is not a package name; write lowercase letters"),
        (["package_name=class"], "package_name: 'class' is not a package name"),
        (["package_name=torch"], "a package torch exists already; write another, for instance torch_experiments"),
        (["project_name=six"], "a package six exists already"),
        (["package_name=json"], "a package json exists already"),
        (["package_name=pipeline"], "a package pipeline exists already"),
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


def test_a_project_can_be_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bake(tmp_path / "one" / "sparks")
    monkeypatch.syspath_prepend(first.folder / "src")

    assert bake(tmp_path / "two" / "sparks").files() >= {"src/sparks/model.py"}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        create("ddp-project", tmp_path / "mine", ["model=x", "nothing=1", "docker=x"], no_input=True)
    assert len(str(caught.value).splitlines()) == 3

    with pytest.raises(UsageError) as caught:
        create("ddp-project", tmp_path / "mine", ["package_name=json", "workers=0", "data=text", "model=mlp"], no_input=True)
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
    tree = git(project, "log", "--format=%(trailers:key=Template-Tree,valueonly)")
    assert tree == git(project, "rev-parse", "HEAD^{tree}")


def test_a_global_ignore_file_leaves_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ignored").write_text("*.md\n*.yaml\ntests/\n.cruft.json\n")
    (tmp_path / "config").write_text(f"[core]\n  excludesFile = {tmp_path / 'ignored'}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))

    project = bake(tmp_path / "mine")

    assert set(git(project.folder, "ls-files").splitlines()) == project.files() - {"pipeline.local.mk"}
    assert update(project.folder, []).files == ()


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


def test_the_metadata_is_crufts(tmp_path: Path) -> None:
    project = bake(tmp_path / "mine", data="text", model="own").folder
    state = json.loads((project / ".cruft.json").read_text())

    assert state["directory"].endswith("ddp-project")
    assert state["context"]["cookiecutter"]["data"] == "text"
    assert state["context"]["cookiecutter"]["__package_name"] == "mine"
    assert ".git" in state["skip"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("cookiecutter.json", "is missing; the templates are broken"),
        ("ddp-project/cookiecutter.json", "is missing; the templates are broken"),
        ("ddp-project/local_extensions.py", "is missing; the templates are broken"),
        ("ddp-project/templates/model/resnet.py", "the template ddp-project is broken: 'model/resnet.py' not found"),
    ],
)
def test_a_missing_file_of_the_templates(templates: Path, tmp_path: Path, broken: str, said: str) -> None:
    (templates / broken).unlink()

    with pytest.raises(UsageError, match=re.escape(said)):
        create("ddp-project", tmp_path / "mine", [], no_input=True)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "can't be read"), ("[]", "is no mapping"), ("{}", "lists no templates"), ('{"templates": 1}', "lists no")],
)
def test_a_broken_list_of_templates(templates: Path, tmp_path: Path, text: str, said: str) -> None:
    (templates / "cookiecutter.json").write_text(text)

    with pytest.raises(UsageError, match=said):
        create(None, tmp_path / "mine", [], no_input=True)


def test_a_folder_of_templates_that_is_gone(templates: Path, tmp_path: Path) -> None:
    shutil.rmtree(templates)

    with pytest.raises(UsageError, match="install ddp-pipeline again or restore the file"):
        create("ddp-project", tmp_path / "mine", [], no_input=True)


def test_the_command_prints_the_next_commands(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "dp-prototype", str(tmp_path / "mine"), "--no-input", "--set", "strategy=single")

    assert ended.code == 0, ended.output
    assert re.search(r"Next:\n  cd \S+mine\n  pip install -e \.\n  pipeline run experiments/first\.yaml --quick\n", ended.stdout)


def test_the_command_shows_a_message_and_no_traceback(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("new", "ddp-project", str(tmp_path / "mine"), "--no-input", "--set", "data=text", "--set", "model=mlp")

    assert ended.code == 2
    assert ended.stderr == "error: model: mlp doesn't take text; write transformer or own, or other data\n"


@pytest.mark.parametrize(("data", "model"), [("digits", "ResNet"), ("table", "MLP"), ("text", "GPT")])
def test_the_default_model_takes_the_data(tmp_path: Path, data: str, model: str) -> None:
    project = bake(tmp_path / "mine", data=data).folder

    assert f"_target_: mine.model.{model}\n" in (project / "experiments" / "first.yaml").read_text()


def test_nobody_to_ask(tmp_path: Path) -> None:
    done = command_without_terminal(tmp_path, "new")

    assert done.returncode == 2
    assert "add --no-input" in done.stderr
    assert "Traceback" not in done.stderr


def test_questions_are_asked(tmp_path: Path) -> None:
    answers = ["2", "My! Idea", "My Idea", "2"]  # template, project, project again, strategy
    lines = "\\n".join(answers)
    out = succeed(tmp_path, "sh", "-c", f"printf '{lines}\\n' | {sys.executable} -m pipeline new", **CHECKOUT)

    assert "ddp-project: Train on several devices" in out
    assert "error: project_name: 'My! Idea' is not a name" in out
    assert "strategy: single" in (tmp_path / "my-idea" / "experiments" / "first.yaml").read_text()
    assert (tmp_path / "my-idea" / "src" / "my_idea").is_dir()


def test_a_folder_whose_name_is_taken_is_refused_before_the_questions(tmp_path: Path) -> None:
    line = f"printf '\\n\\n\\n\\n' | {sys.executable} -m pipeline new ddp-project torch"
    done = command(tmp_path, "sh", "-c", line, **CHECKOUT)

    assert done.returncode == 2
    assert "a package torch exists already" in done.stderr
    assert "Task" not in done.stdout


def test_at_most_five_questions_offer_what_fits(tmp_path: Path) -> None:
    assert catalog.find("ddp-project").question_names() == ("project_name", "task", "data", "model", "launcher")
    answers = ["1", "Rows", "", "4", "", ""]  # template, project, task, data, model, launcher
    lines = "\\n".join(answers)
    out = succeed(tmp_path, "sh", "-c", f"printf '{lines}\\n' | {sys.executable} -m pipeline new", **CHECKOUT)

    assert "1 - mlp: multilayer perceptron" in out
    assert "pretrained:" not in out
    assert "transformer:" not in out
    assert "_target_: rows.data.table" in (tmp_path / "rows" / "experiments" / "first.yaml").read_text()


def command_without_terminal(folder: Path, *arguments: str) -> Any:
    return command(folder, "sh", "-c", f"{sys.executable} -m pipeline {' '.join(arguments)} </dev/null", **CHECKOUT)


CHECKOUT = {"PYTHONPATH": str(REPOSITORY)}


def test_update_takes_no_template(tmp_path: Path) -> None:
    done = command_without_terminal(tmp_path, "new", "ddp-project", "--update")

    assert done.returncode == 2
    assert "--update works on the project in the working directory" in done.stderr


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

    def test_a_rejected_answer_is_asked_again(self, tmp_path: Path) -> None:
        answers = "\\n".join(["in!valid", "My Idea", "gan", "digits", "image_folder", "", "slurm", "torchrun"])
        line = f"printf '{answers}\\n' | {sys.executable} -m cookiecutter {REPOSITORY / 'templates' / 'ddp-project'}"
        out = succeed(tmp_path, "sh", "-c", line, HOME=str(tmp_path))

        assert "error: data: 'digits' is not offered; write image_folder\n" in out
        assert "table" not in out
        assert "launcher: torchrun" in (tmp_path / "my-idea" / "experiments" / "first.yaml").read_text()

    def test_wrong_answers_leave_nothing(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        home.mkdir()
        template = REPOSITORY / "templates" / "ddp-project"
        done = command(
            tmp_path, "cookiecutter", template, "--no-input", "__package_name=torch", "__workers=0", HOME=str(home)
        )

        assert done.returncode == 1
        assert done.stdout.splitlines() == [
            "error: package_name: a package torch exists already; write another, for instance torch_experiments",
            "error: workers: '0' is not a number of workers; write 1 to 9999",
        ]
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == [home]

    @pytest.mark.parametrize("which", ["templates/ddp-project", "templates"])
    def test_a_wrong_choice_ends_in_a_sentence(self, tmp_path: Path, which: str) -> None:
        line = ("cookiecutter", REPOSITORY / which, "--no-input", "data=csv", "__docker=maybe")
        done = command(tmp_path, *line, HOME=str(tmp_path))

        assert done.returncode == 1
        assert done.stdout.splitlines() == [
            "error: data: 'csv' is not a choice; write one of digits, cifar10, image_folder, table, table_classes, text, text_classes, own",
            "error: docker: 'maybe' is not a choice; write one of no, yes",
        ]
        assert done.stderr == ""
        assert not (tmp_path / "my-experiments").exists()
