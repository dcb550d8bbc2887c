"""The commands as scripts and shells use them: one document on standard output, looking back, verbs for Tab."""

# promise: completion of verbs and options, `--json` and `--quiet` in separate processes

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Ended

ROOT = Path(__file__).parents[3]
MLP = str(ROOT / "experiments" / "mlp.yaml")

Command = Callable[..., Ended]


def test_an_unknown_run_is_a_usage_error(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (["show", "latest"], ["compare", "a", "b"], ["show", "x", "--json"]):
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


def test_bash_completes_verbs_and_options(tmp_path: Path) -> None:
    (tmp_path / "pipeline").write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline "$@"\n')
    (tmp_path / "pipeline").chmod(0o755)
    script = """
        offered() { COMP_WORDS=(pipeline "$@"); COMP_CWORD=$#; _pipeline_completion pipeline; echo "${COMPREPLY[@]}"; }
        eval "$(pipeline --show-completion bash)"
        offered sho
        offered run --dry
    """
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", script],
        cwd=ROOT, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (["show", "--dry-run"], "")


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    """As in ``pipeline schema | head -1``."""
    line = f"{sys.executable} -m pipeline schema | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.stdout, done.stderr) == ("{\n", "")
