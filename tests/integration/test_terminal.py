"""The commands as scripts and shells use them: one document on standard output, looking back, words for Tab."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Ended

from pipeline.cli import completion

ROOT = Path(__file__).parents[2]
MLP = str(ROOT / "experiments" / "mlp.yaml")
INPROCESS = ("parallel.launcher=inprocess", "parallel.strategy=single", "parallel.workers=1", "train.epochs=1")

Command = Callable[..., Ended]


def test_an_unknown_run_is_a_usage_error(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (["show", "latest"], ["diff", "a", "b"], ["show", "x", "--json"]):
        ended = command(*line)
        assert (ended.code, ended.stdout) == (2, "")
        assert "no such run in runs" in ended.stderr
    ended = command("list")
    assert (ended.code, ended.stdout) == (0, "")
    assert "runs has no runs" in ended.stderr
    assert json.loads(command("list", "--json").stdout) == []


def test_check_for_scripts(command: Command, tmp_path: Path) -> None:
    broken, missing = tmp_path / "broken.yaml", tmp_path / "missing.yaml"
    broken.write_text(Path(MLP).read_text().replace("epochs: 5", "epochs: five"))

    ended = command("check", MLP, str(broken), str(missing), "--json")
    good, bad, gone = json.loads(ended.stdout)

    assert ended.code == 2
    assert good == {"file": MLP, "problems": []}
    (problem,) = bad["problems"]
    assert problem["key"] == "train.epochs"
    assert problem["place"].startswith(f"{broken}:")
    assert "no such file" in gone["problems"][0]["message"]
    ended = command("check", MLP, "--quiet")
    assert (ended.code, ended.output) == (0, "")


def test_a_dry_run_for_scripts(command: Command) -> None:
    ended = command("run", MLP, "--dry-run", "--json")

    plan = json.loads(ended.stdout)
    assert (ended.code, ended.stderr) == (0, "")
    assert [trial["role"] for trial in plan["trials"]] == ["main", "baseline", "reference"]
    assert (plan["train_samples"], plan["steps_per_epoch"]) == (1438, 23)


def test_the_version_names_what_matters(command: Command) -> None:
    lines = dict(line.split(" ", 1) for line in command("--version").stdout.splitlines())

    assert list(lines) == ["pipeline", "python", "torch", "ray", "mlflow"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert commit[:12] in lines["pipeline"]


def test_no_command_shows_the_help(command: Command) -> None:
    ended = command()
    assert "Usage: pipeline" in ended.output
    assert "Traceback" not in ended.output


def bash(script: str, *, folder: Path) -> list[str]:
    """Lines that a bash prints in which completion is on; ``offered WORD...`` is Tab behind the last word."""
    (folder / "pipeline").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline "$@"\n')
    (folder / "pipeline").chmod(0o755)
    prelude = """
        compopt() { echo "$@"; }
        offered() { COMP_WORDS=(pipeline "$@"); COMP_CWORD=$#; _pipeline_completion pipeline
                    printf '%s\\n' "${COMPREPLY[@]}" --; }
        eval "$(pipeline --show-completion bash)"
    """
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", f"{prelude}\n{script}"],
        cwd=ROOT, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_offers_what_comes_next(tmp_path: Path) -> None:
    """bash takes words apart at each =, so that the value stands alone; no space comes between key and value."""
    lines = bash(
        """
        offered sho
        offered run experiments/m
        offered run experiments/mlp.yaml train.ep
        offered run experiments/mlp.yaml parallel.launcher = t
        offered run experiments/mlp.yaml parallel.launcher =
        """,
        folder=tmp_path,
    )
    assert [answer.split() for answer in "\n".join(lines).split("--") if answer] == [
        ["show"], ["experiments/mlp.yaml"], ["-o", "nospace", "train.epochs="], ["torchrun"],
        ["inprocess", "ray", "torchrun"],
    ]  # fmt: skip


def words(*line: str, cwd: Path, shell: str = "bash") -> tuple[str, list[str]]:
    """What a shell is told, and the heavy modules that were loaded for it."""
    code = (
        "import sys; from pipeline import cli\n"
        "sys.argv = ['pipeline']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'ray', 'mlflow'} & set(sys.modules)), file=sys.stderr)"
    )
    asked = {"_PIPELINE_COMPLETE": f"complete_{shell}", "COMP_WORDS": "\n".join(["pipeline", *line])}
    asked |= {"COMP_CWORD": str(len(line)), "_TYPER_COMPLETE_ARGS": " ".join(["pipeline", *line])}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **asked, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stdout, json.loads(done.stderr.strip().splitlines()[-1].replace("'", '"'))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["run", "experiments/mlp.yaml", "model._target_", "=", "pipeline.models.r"], "pipeline.models.resnet18"),
        (["compare", "experiments/mlp.yaml", "--strategies", "single,d"], "single,ddp"),
        (["run", "experiments/mlp.yaml", "--resume", "lat"], "latest"),
        (["new", "d"], "ddp-project"),
    ],
)
def test_completion_loads_nothing_heavy(line: list[str], offered: str) -> None:
    text, heavy = words(*line, cwd=ROOT)
    assert offered in text.splitlines()
    assert heavy == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_keep_key_and_value_in_one_word(shell: str) -> None:
    text, _ = words("run", "experiments/mlp.yaml", "train.precision=b", cwd=ROOT, shell=shell)
    assert "train.precision=bf16" in text
    assert "fp32" not in text


def test_runs_are_offered_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("20260301-1", "20260302-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.runs("") == ["latest", "20260302-1", "20260301-1"]
    assert completion.runs("20260301") == ["20260301-1"]


def test_files_are_offered_here_and_one_folder_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.yaml", "notes.txt", "experiments/b.yml", ".hidden/c.yaml", "experiments/deep/d.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert completion.files("") == ["a.yaml", "experiments/b.yml"]
    assert completion.files("exp") == ["experiments/b.yml"]
    assert completion.files("experiments/") == ["experiments/b.yml", "experiments/deep/d.yaml"]
    assert completion.files("[") == ["a.yaml", "experiments/b.yml"]


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    """As in ``pipeline schema | head -1``."""
    line = f"{sys.executable} -m pipeline schema | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.stdout, done.stderr) == ("{\n", "")
