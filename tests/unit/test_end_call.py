"""``tracking.on_end``: what its function gets at the end of a run, and that it can't harm the run."""

# promise: `tracking.on_end` gets status, result and links of a run that ended or broke; what it raises is a warning

import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from recordings import JOURNALS

from pipeline.commands import end_call
from pipeline.config import environment
from pipeline.protocol.run_end import RunEnd

REPORT: Any = SimpleNamespace(verdict="ddp, 2 workers: 1.7x of single")


class Notified:
    """What the functions below were called with."""

    ends: ClassVar[list[RunEnd]] = []


def keep(end: RunEnd) -> None:
    sys.stdout.write("notified\n")
    Notified.ends.append(end)


def fail(end: RunEnd) -> None:
    raise ConnectionError("https://lab:secret@hooks.example/1 refused")


def leave(end: RunEnd) -> None:
    sys.exit(7)


def talk(end: RunEnd) -> None:
    os.write(1, b"of a child\n")  # as a program does that the function starts


def hang(end: RunEnd) -> None:
    time.sleep(3)


def call(name: str, folder: Path) -> list[str]:
    """Call a function of this file at the end of a run; return the warnings."""
    component = SimpleNamespace(target=f"test_end_call.{name}", arguments={})
    experiment = SimpleNamespace(name="lab", tracking=SimpleNamespace(on_end=component))
    plan: Any = SimpleNamespace(experiment=experiment, main=SimpleNamespace(allowed=("test_end_call",)))
    warnings: list[str] = []
    sys.modules["test_end_call"] = sys.modules[__name__]
    end_call.call_on_end(plan, REPORT, folder, warn=warnings.append)
    return warnings


@pytest.mark.parametrize(
    ("journal", "status", "result"),
    [
        ("finished", "FINISHED", REPORT.verdict),
        ("failed", "FAILED", "rank 1 on node-1: ZeroDivisionError: the model's own mistake"),  # also after its report
    ],
)
def test_the_end_has_status_result_and_links(
    journal: str, status: str, result: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(JOURNALS / journal, tmp_path / journal))
    Notified.ends.clear()
    assert call("keep", folder) == []
    (end,) = Notified.ends
    assert (end.run, end.experiment, end.status, end.result) == (journal, "lab", status, result)
    assert end.links["folder"] == str(folder)
    assert ("report" in end.links) == (folder / "report.html").exists()
    assert end.links["mlflow"].startswith("http")
    assert str(end).startswith(f"lab {status}: {result}\n{folder}\n")
    assert capsys.readouterr() == ("", "notified\n")  # stdout may be a JSON document


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fail", "test_end_call.fail raised ConnectionError: https://hooks.example/1 refused"),
        ("leave", "test_end_call.leave raised SystemExit: 7"),
        ("nothing", "test_end_call has no nothing"),
    ],
)
def test_what_goes_wrong_is_a_warning(name: str, said: str) -> None:
    (warning,) = call(name, JOURNALS / "finished")
    assert said in warning
    assert warning.endswith("The run is not affected.")


def test_what_a_child_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("talk", JOURNALS / "finished") == []
    os.write(1, b"a document\n")
    assert capfd.readouterr() == ("a document\n", "of a child\n")


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_call, "_PATIENCE_S", 0.05)
    (warning,) = call("hang", JOURNALS / "finished")
    assert warning.startswith("tracking.on_end: test_end_call.hang did not return within 0.05 s")


def test_a_secret_that_is_not_set_is_an_error_before_the_run() -> None:
    (problem,) = environment.unset({"url": "${oc.env:NO_SUCH_TOKEN}"}, key="tracking.on_end")
    assert (problem.key, "NO_SUCH_TOKEN is not set" in problem.message) == ("tracking.on_end.url", True)
    assert not list(environment.unset({"url": "${oc.env:NO_SUCH_TOKEN}"}, key="model"))  # may be set on the nodes
