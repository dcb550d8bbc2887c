"""``pipeline run`` and ``benchmark`` as a whole, from the plan to the exit code, with recorded workers."""

# promise: `list`, `show`, `diff` of every kind of run; `--json`, `--quiet`; `show` while it runs, with MLflow's link

import json
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from recordings import JOURNALS, Store

from pipeline.drive import preflight
from pipeline.errors import Terminated, interrupt
from pipeline.protocol.events import Finished, RunClosed, TrialOpened
from pipeline.record.journal import FILE_NAME, is_open, read
from pipeline.results import record
from pipeline.system import handle_signals

Play = Callable[..., Any]
DDP = ("parallel.strategy=ddp", "parallel.workers=2")
SINGLE = ("parallel.strategy=single", "parallel.workers=1")


def run_in(lab: Path) -> Path:
    (folder,) = (lab / "runs").iterdir()
    return folder


def kinds(folder: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read(folder / FILE_NAME) if isinstance(event, kind)]


def test_a_run_tells_how_far_it_is_what_came_out_and_what_the_workers_measured(
    play: Play, lab: Path, store: Store
) -> None:
    ended = play("finished", "run", "tiny.yaml")

    assert ended.code == 0
    lines = ended.stderr.splitlines()
    told = [line for line in lines if line.startswith(("baseline:", "ddp, 2 workers:", "reference:"))]
    assert [line.partition(" starting")[0] for line in told if "starting" in line] == ["ddp, 2 workers:"]
    assert [line.partition(" done")[0] for line in told if ": done" in line] == ["ddp, 2 workers:"]
    assert [line.partition(": timed, not trained")[0] for line in told if ": timed" in line] == [
        "baseline: 1 worker", "reference: 1 process, 2 cores"
    ]  # fmt: skip
    assert [line.split(": ")[1].split(",")[0] for line in told if ": step " in line and line.startswith("ddp")] == [
        "step 23/46", "step 46/46"
    ]  # fmt: skip
    best = "validation/accuracy 0.8914, validation/loss 0.3469"
    assert any(line.startswith(f"ddp, 2 workers: step 46/46, {best}") for line in told)
    folder = run_in(lab)
    screen = ended.stdout
    assert screen.startswith("tiny: training completed ")
    assert len(screen.splitlines()) <= 24
    assert screen.splitlines()[-2] == f"Report   runs/{folder.name}/report.html"
    assert screen.splitlines()[-1] == f"More     pipeline show {folder.name[-4:]} --full    MLflow: pipeline ui"
    log = (folder / "log.txt").read_text()
    assert set(told) <= set(log.splitlines())

    events = list(read(folder / FILE_NAME))
    assert [event.trial for event in kinds(folder, TrialOpened)] == ["main", "baseline", "reference"]
    assert [event.trial for event in kinds(folder, Finished)] == ["main", "baseline", "reference"]
    assert isinstance(events[-1], RunClosed)
    assert (events[-1].status, "**2 workers (ddp): " in events[-1].summary) == ("FINISHED", True)
    assert not is_open(folder / FILE_NAME)
    (main,) = (run for run in store.runs("tiny") if run.data.tags["role"] == "main")
    assert (main.info.status, main.info.run_name) == ("FINISHED", "ddp, 2 workers")
    assert main.data.tags["pipeline.run"] == folder.name
    assert [step for step, _ in store.series(main, "train/loss")] == list(range(1, 47))
    check_report(folder, store)


def check_report(folder: Path, store: Store) -> None:
    """Compare the report, MLflow and the files with what the workers have measured."""
    rates = {end.trial: end.result.samples_per_second.median for end in kinds(folder, Finished)}
    result = record.read(folder)
    assert result is not None
    facts = {key: result.fact(key) for key in ("speedup", "efficiency", "speedup_rounds")}
    speedup, efficiency, rounds = (fact for fact in facts.values() if fact is not None)

    assert speedup.value == pytest.approx(rates["main"] / rates["baseline"])
    assert efficiency.value == pytest.approx(rates["main"] / rates["baseline"] / 2)
    runs = {run.data.tags["role"]: run.data.metrics for run in store.runs("tiny")}
    assert runs["main"]["speedup"] == pytest.approx(speedup.value)
    assert runs["main"]["efficiency"] == pytest.approx(efficiency.value)
    names = ("speedup_ci_low", "speedup_ci_high", "speedup_rounds")
    assert [runs["main"][name] for name in names] == pytest.approx([speedup.low, speedup.high, 8])
    assert (rounds.value, speedup.state) == (8, "ok")
    assert runs["baseline"]["samples_per_second"] == pytest.approx(rates["baseline"])
    told = {run.data.tags["role"]: run.data.tags.get("speedup", "-") for run in store.runs("tiny")}
    assert told == {"baseline": "-", "reference": str(result.fact("speedup", "reference")), "main": str(speedup)}
    (main,) = (run for run in store.runs("tiny") if run.data.tags["role"] == "main")
    artifacts = {entry.path for entry in store.client.list_artifacts(main.info.run_id)}
    assert {"result.json", "speedup_table.json", "report.html"} < artifacts
    page = (folder / "report.html").read_text()
    assert page.count("<svg ") == 2  # the recording has no losses.npy for a third one
    assert "src=" not in page


@pytest.mark.parametrize("quiet", [True, False])
def test_scripts_get_one_document_and_nothing_else(play: Play, lab: Path, command: Any, quiet: bool) -> None:
    ended = play("single", "run", "tiny.yaml", *SINGLE, "--json", *["--quiet"] * quiet)

    assert ended.code == 0, ended.stderr
    assert ("samples/s" in ended.stderr) != quiet
    document = json.loads(ended.stdout)
    assert (document["run"], document["name"]) == (run_in(lab).name, "tiny")
    facts = {fact["key"]: fact["value"] for fact in document["facts"]}
    assert facts["samples_per_second"] > 0
    assert "speedup" not in facts  # this training would be its own baseline
    assert facts["validation/accuracy"] > 0.8
    assert json.loads(command("show", "latest", "--json").stdout) == document


def test_quiet_leaves_the_result(play: Play, lab: Path) -> None:
    ended = play("single", "run", "tiny.yaml", *SINGLE, "--no-baseline", "--quiet")

    assert ended.code == 0
    assert all(line.startswith(("note: ", "waiting until MLflow")) for line in ended.stderr.splitlines())
    assert ended.stdout == "1 worker: validation/accuracy 0.8914; speedup not measured\n"


def test_a_failed_rank_is_named_with_its_own_traceback(play: Play, lab: Path, store: Store) -> None:
    ended = play("failed", "run", "lab.yaml", *DDP)

    assert ended.code == 1
    assert "ZeroDivisionError: the model's own mistake" in ended.stderr
    assert 'lab.py", line' in ended.stderr
    assert "Connection closed by peer" not in ended.stderr  # what the other rank got to see of it
    assert "error: rank 1 on node-1" in ended.stderr
    (closed,) = kinds(run_in(lab), RunClosed)
    assert (closed.status, closed.message) == ("FAILED", "rank 1 on node-1: ZeroDivisionError: the model's own mistake")
    runs = {run.data.tags["role"]: run for run in store.runs("lab")}
    assert {role: run.info.status for role, run in runs.items()} == {
        "main": "FAILED"
    }  # with it, what it was to be compared with
    assert runs["main"].data.tags["error"] == closed.message


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_samples(play: Play, lab: Path) -> None:
    ended = play("nan-stopped", "run", "lab.yaml", *DDP, "--no-baseline")

    assert ended.code == 1
    assert "the loss is nan in step 3 (epoch 1); " in ended.stderr
    assert "samples 44, " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [closed.status for closed in kinds(run_in(lab), RunClosed)] == ["FAILED"]


def test_skipped_steps_are_told(play: Play, lab: Path, store: Store) -> None:
    ended = play("nan", "run", "lab.yaml", *SINGLE, "train.on_nonfinite=skip")

    assert ended.code == 0, ended.stderr
    assert "1 worker: warning: 2 steps were skipped because they were not finite: 3, 6" in ended.stderr
    (run,) = store.runs("lab")
    assert [step for step, loss in store.series(run, "train/loss") if loss != loss] == [3, 6]
    assert dict(store.series(run, "train/skipped_steps")) == {4: 1.0, 8: 2.0}


def test_an_interrupted_run_says_so_everywhere(play: Play, lab: Path, store: Store) -> None:
    ended = play("interrupted", "run", "lab.yaml", *DDP, "--no-baseline")

    (again,) = re.findall(r"^error: interrupted; continue it with: pipeline (.*)\n\Z", ended.stderr, re.MULTILINE)
    assert ended.code == 130
    words = again.split()
    assert (words[:2], words[-3:]) == (["run", "lab.yaml"], ["--no-baseline", "--resume", run_in(lab).name])
    assert set(DDP) < set(words)
    (closed,) = kinds(run_in(lab), RunClosed)
    assert (closed.status, closed.message) == ("KILLED", "interrupted")
    assert [run.info.status for run in store.runs("lab")] == ["KILLED"]


@pytest.mark.parametrize(("signal_", "code"), [(Terminated, 143), (KeyboardInterrupt, 130)])
def test_an_interrupted_report_leaves_a_completed_run_that_can_get_it(
    play: Play, lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch, signal_: type[KeyboardInterrupt], code: int
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise signal_

    options = ("run", "tiny.yaml", *SINGLE, "--no-baseline")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.commands.invocation._render_page", interrupted)
        ended = play("single", *options)
    folder = run_in(lab)
    assert ended.code == code
    assert "; the training is complete, only its report is missing; continue it with: pipeline run " in ended.stderr
    assert [(closed.status, closed.message) for closed in kinds(folder, RunClosed)] == [("FINISHED", "")]
    assert [run.info.status for run in store.runs("tiny")] == ["FINISHED"]

    again = play("single", *options, "--resume", folder.name)
    assert again.code == 0, again.stderr
    assert (folder / record.FILE_NAME).is_file()
    assert len(kinds(folder, TrialOpened)) == 1
    assert "has finished. To continue it" in play("single", *options, "--resume", folder.name).stderr


def test_an_interrupt_that_was_swallowed_comes_before_there_is_a_run(
    play: Play, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = preflight.check

    def check(*arguments: Any, **options: Any) -> Any:
        with suppress(KeyboardInterrupt), handle_signals(interrupt, signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
        return checked(*arguments, **options)

    monkeypatch.setattr("pipeline.errors._interrupts", [])
    monkeypatch.setattr(preflight, "check", check)
    ended = play("finished", "run", "lab.yaml", *DDP)

    assert (ended.code, ended.stderr.splitlines()[-1]) == (130, "error: interrupted")
    assert not (lab / "runs").exists()


def test_a_comparison_reports_each_cell(play: Play, lab: Path, store: Store) -> None:
    ended = play(
        "comparison", "benchmark", "tiny.yaml", "--strategies", "single,ddp", "--workers", "1,2", "--repeats", "2"
    )

    assert ended.code == 0, ended.stderr
    result = record.read(run_in(lab))
    assert result is not None
    repeats: dict[str, list[float]] = {}
    for event in read(JOURNALS / "comparison" / FILE_NAME):
        if isinstance(event, Finished):
            repeats.setdefault(event.result.trial, []).append(event.result.samples_per_second.median)
    assert set(repeats) == {fact.trial for fact in result.all_facts} - {"main"}
    for name, rates in repeats.items():
        rate, rounds = result.fact("samples_per_second", name), result.fact("speedup_rounds", name)
        assert rate is not None
        assert rate.value == pytest.approx(geometric_mean(rates))
        assert rounds is None or rounds.value == 2
    for row in result.tables[0].rows:
        assert f"\n{row[0]}  " in ended.stdout
    parent = next(run for run in store.runs("tiny") if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in store.runs("tiny") if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len({run.info.run_name for run in children}) == len(result.tables[0].rows)
