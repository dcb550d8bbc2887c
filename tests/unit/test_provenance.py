"""The command that a run's journal keeps: as it was typed, without credentials, and only if it was ours."""

import sys

import pytest
from outer import outer_torchrun

from pipeline.record import provenance


@pytest.mark.parametrize("program", ["/opt/venv/bin/pipeline", "/opt/site-packages/pipeline/__main__.py"])
def test_the_command_is_kept_as_it_can_be_pasted(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "run", "my file.yaml", "train.epochs=2", "--no-baseline"])
    assert provenance.command() == "pipeline run 'my file.yaml' train.epochs=2 --no-baseline"


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("tracking.uri=http://me:word@host:5000", "tracking.uri=http://host:5000"),
        ("http://me:word@host:5000/x", "http://host:5000/x"),
        ("tracking.uri=postgresql://host/db?password=word&ssl=1", "'tracking.uri=postgresql://host/db?ssl=1'"),
        ("tracking={uri: http://me:word@host:5000, tags: {}}", "'tracking={uri: http://host:5000, tags: {}}'"),
        ("tracking.uri=http://me:word@[::1", "'tracking.uri=http://[::1'"),
        ("tracking.uri=sqlite:///mlflow.db", "tracking.uri=sqlite:///mlflow.db"),
    ],
)
def test_the_command_is_kept_without_credentials(argument: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "run", argument])
    assert provenance.command() == f"pipeline run {kept}"


@pytest.mark.parametrize("program", ["train.py", "/opt/site-packages/pytest/__main__.py", "", "pipeline"])
def test_another_program_and_a_rank_of_torchrun_are_no_command_of_ours(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "run"])
    for name, value in outer_torchrun().items() if program == "pipeline" else ():
        monkeypatch.setenv(name, value)
    assert provenance.command() == ""
