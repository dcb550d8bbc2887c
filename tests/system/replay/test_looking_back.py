"""`list`, `show` and `compare` on recorded runs, for people and for scripts."""

# promise: `list`, `show`, `compare` of every kind of run; `--json`, `--quiet`; `show` while it runs, with MLflow's link

import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from recordings import Recording

from pipeline.commands.list import HEADER
from pipeline.protocol.events import Evaluated, Metrics, ModelSaved, RunOpened, TrialOpened
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.results.record import Fact, Result, save
from pipeline.tracking.follow import sync
from pipeline.tracking.store import TrackingOutcome

Recorded = Callable[[str], Recording]
ENDS = {
    "finished": ("run", "FINISHED", 2), "single": ("run", "FINISHED", 1), "failed": ("run", "FAILED", 2),
    "nan": ("run", "FINISHED", 1), "nan-stopped": ("run", "FAILED", 2), "interrupted": ("run", "KILLED", 2),
    "killed": ("run", "KILLED", 2), "elastic": ("run", "FINISHED", 1), "comparison": ("benchmark", "FINISHED", None),
    "sweep": ("sweep", "FINISHED", None),
}  # fmt: skip


@pytest.fixture
def there(command: Any, lab: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, where the recorded runs are."""
    monkeypatch.chdir(lab)
    monkeypatch.setenv("COLUMNS", "120")
    return command


def test_all_runs_are_listed_with_what_became_of_them(there: Any, journal: Recorded) -> None:
    names = {journal(name).folder.name: name for name in ENDS}

    found = {names.get(record["run"], record["run"]): record for record in json.loads(there("list", "--json").stdout)}
    for name, (command, status, workers) in ENDS.items():
        assert (found[name]["command"], found[name]["status"], found[name]["workers"]) == (command, status, workers)
    trials = {run: record["sweep"] for run, record in found.items() if "/trial-" in run}
    assert len(trials) == 3
    assert {names[sweep] for sweep in trials.values()} == {"sweep"}
    header, *rows = there("list").stdout.splitlines()
    assert header.split() == list(HEADER)
    assert [row.split()[0] for row in rows] == [run.rpartition("/")[2] for run in there("list", "-q").stdout.split()]
    (row,) = (row for row in rows if row.startswith(journal("finished").folder.name))
    assert row.split()[-4:] == ["ddp,", "2", "workers", "tiny"]


def test_show_prints_the_report_again_and_where_to_look(there: Any, journal: Recorded, store: Any) -> None:
    finished = journal("finished")
    sync(finished.folder, warn=pytest.fail)
    shown = [there("show", text) for text in ("latest", finished.folder.name[:20], str(finished.folder))]
    away = finished.folder.rename(finished.folder.parents[1] / "away")
    assert f"\nReport   {away}/report.html\n" in there("show", str(away)).stdout  # not where it was
    away.rename(finished.folder)

    assert [ended.code for ended in shown] == [0, 0, 0], shown
    assert shown[0].stdout == shown[1].stdout
    assert len(shown[0].stdout.splitlines()) <= 24
    assert f"\nReport   {Path('runs') / finished.folder.name / 'report.html'}\n" in shown[0].stdout
    whole = there("show", "latest", "--full").stdout
    assert all(fragment in whole for fragment in ("tiny: ", "exposed", "mlflow   pipeline ui, then http"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("failed", "it failed: rank 1 on node-1: ZeroDivisionError: the model's own mistake"),
        ("nan-stopped", "it failed: rank 0 on node-1: the loss is nan in step 3"),
        ("interrupted", "it was killed: interrupted"),
        ("killed", "it was killed"),
        ("nan", "2 steps"),
        ("comparison", "2 workers (ddp)"),
        ("sweep", "stopped"),
    ],
)
def test_show_knows_every_kind_of_run(there: Any, journal: Recorded, name: str, said: str) -> None:
    run = journal(name)
    ended = there("show", run.folder.name, "--full")

    assert (ended.code, ended.stderr) == (0, "")
    if name == "nan":  # told while it ran
        assert said in (run.folder / "log.txt").read_text()
    else:
        assert said in " ".join(ended.stdout.split())
    as_json = there("show", run.folder.name, "--json")
    if (run.folder / "report.html").exists() or name == "sweep":
        assert json.loads(as_json.stdout)
    elif name in ("failed", "nan-stopped", "interrupted", "killed"):
        assert (as_json.code, as_json.stdout) == (2, "")
        assert "so it has no result" in as_json.stderr


def test_a_sweep_names_the_command_that_trains_its_best_again(there: Any, journal: Recorded) -> None:
    run = journal("sweep").folder.name
    shown = re.sub(r" \\\n *", " ", there("show", run).stdout)  # a command of several lines
    (again,) = (line for line in shown.splitlines() if line.startswith("RETRAIN  pipeline run tiny.yaml "))
    assert again.endswith(" optimizer.lr=0.05")
    assert "sweep=" not in again
    assert "stopped early by ASHA after epoch 4" in there("show", f"{run}/trial-001").stdout
    assert "it has no result.json; to make it: pipeline run " in there("show", f"{run}/trial-002").stdout
    difference = json.loads(there("compare", f"{run}/trial-001", f"{run}/trial-002", "--json").stdout)
    assert ["optimizer.lr", "0.1", "0.05"] in difference["tables"][0]["rows"]


def test_a_difference_holds_what_differs_and_nothing_else(there: Any, journal: Recorded) -> None:
    a, b = journal("finished").folder.name, journal("single").folder.name
    apart = there("compare", a, b, "--mode", "max", "--json")

    assert apart.code == 0, apart.stderr
    found = json.loads(apart.stdout)
    differing = {name: cells for name, *cells in found["tables"][0]["rows"]}
    assert differing["parallel.launcher"] == ["torchrun", "inprocess"]
    assert "model.hidden" not in differing
    assert "No differences: environment" in found["notes"]
    assert found["answer"] == "inconclusive"
    assert {fact["key"]: fact["value"] for fact in found["facts"]}["pairs"] == 1
    text = there("compare", a, b, "--mode", "max").stdout
    assert "RESULT   Inconclusive whether B is better than A: validation/" in text
    assert f"A  {a}" in text
    failed = json.loads(there("compare", a, journal("failed").folder.name, "--json").stdout)
    assert ["status", "FINISHED", "FAILED"] in failed["tables"][0]["rows"]


def test_a_sweep_is_compared_by_its_trials(there: Any, journal: Recorded) -> None:
    found = json.loads(there("compare", journal("sweep").folder.name, "--json").stdout)
    differing = [table["rows"] for table in found["tables"] if table["title"] == "What differs between A and B"]
    assert [row[1] for row in differing[0] if row[0] == "optimizer.lr"] == ["0.1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mlp.yaml"], "error: compare takes at least two experiment files, or --vary"),
        (["mlp.yaml", "train.epochs=2"], "Did you mean: pipeline benchmark mlp.yaml"),
        (["a.yaml", "b.yaml"], "a.yaml: there is no such file"),
        (["latest", "latest"], " is named twice"),
        (["latest"], "error: name at least two runs, or a sweep, e.g. pipeline compare latest RUN"),
    ],
)
def test_a_comparison_of_less_than_two_runs_says_what_to_name(
    there: Any, journal: Recorded, words: list[str], said: str
) -> None:
    journal("finished")
    refused = there("compare", *words)
    assert (refused.code, refused.stdout) == (2, "")
    assert said in refused.stderr


RESULT = Result(
    kind="run",
    name="tiny",
    title="tiny: training completed",
    headline=("2 workers train 1.84x as fast as 1 worker",),
    verdict="1.84x as fast",
    facts=(Fact(key="speedup", value=1.84, low=1.7, high=1.9, unit="x"),),
    notes=("The first note.",),
)


def test_a_result_is_shown_with_the_evaluations_after_it(there: Any, journal: Recorded) -> None:
    run = journal("finished").folder
    save(RESULT, run)
    assert json.loads(there("show", run.name, "--json").stdout) | {"places": []} == json.loads(RESULT.model_dump_json())
    found = {"split": "test", "samples": 97, "step": 4, "epoch": 1, "best": "validation/loss", "checkpoint": "c"}
    with closing(Journal(run / FILE_NAME)) as file:
        for time, loss in ((1.8e9, 0.5), (1.9e9, math.nan)):
            more = {"values": {"test/loss": loss}, "changes": ("seed",)}
            file.append(Evaluated(time=time, trial="evaluation", **found, **more))
    document = json.loads(there("show", run.name, "--json").stdout)
    first, second, third = document["notes"]
    weights = "test set, 97 samples: weights of step 4 (epoch 1), the best validation/loss"
    assert first.startswith("Evaluated 2027-01-15 ")
    assert first.endswith(f": test/loss 0.5: {weights} (seed)")
    assert "test/loss nan" in second
    assert (third, document["facts"][0]["value"]) == ("The first note.", 1.84)
    for words in ((), ("--full",)):
        shown = there("show", run.name, *words).stdout
        assert shown.startswith("tiny: training completed\n\nRESULT   2 workers train 1.84x as fast as 1 worker\n")
        assert "Evaluated 2027-01-15 " in shown
        assert ("data digest" in shown) == bool(words)


def test_a_result_that_is_damaged_or_older_than_its_run_is_named(there: Any, journal: Recorded) -> None:
    run = journal("killed")
    save(RESULT, run.folder)
    shown = there("show", run.folder.name).stdout
    assert shown.startswith(f"{run.folder.name}: it was killed")
    with closing(cut(run, after=reported(28))):
        assert there("show", run.folder.name).stdout.startswith(f"{run.folder.name}: running, ddp, 2 workers, step 28/")
    (run.folder / "result.json").write_text("{")
    refused = there("show", run.folder.name)
    assert (refused.code, refused.stdout) == (2, "")
    assert "result.json: damaged, or of another version. Remove it, and show says how to make it" in refused.stderr
    assert there("list").code == 0


def test_a_finished_run_is_not_resumed(there: Any, journal: Recorded) -> None:
    finished = journal("finished")
    (finished.folder / "result.json").touch()
    ended = there("run", str(finished.folder / "experiment.yaml"), "--resume", finished.folder.name)
    assert ended.code == 2
    assert "has finished. To continue it, train for more than" in ended.stderr


# A run that goes on


def cut(run: Recording, *, after: Callable[[Any], bool]) -> Journal:
    """The journal of a recorded run up to the first event after which it is cut, held open as by its driver."""
    path = run.folder / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    end = next(n for n, event in enumerate(run.events, start=1) if after(event))
    path.write_bytes(b"".join(lines[:end]))
    (run.folder / "report.html").unlink(missing_ok=True)
    return Journal(path)


def reported(step: int) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, Metrics) and event.trial == "main" and event.step >= step


def test_a_run_that_goes_on_is_shown_with_its_progress(there: Any, journal: Recorded) -> None:
    run = journal("killed")
    with closing(cut(run, after=reported(28))):
        shown = there("show", "latest")
        refused = there("show", "latest", "--json")

    assert (shown.code, shown.stderr) == (0, "")
    first, *places = shown.stdout.splitlines()
    known = r"running, ddp, 2 workers, step 28/100, epoch 7/25, loss 0.\d+, 801.7 samples/s, validation/loss 0.2587"
    assert re.fullmatch(f"{run.folder.name}: {known}", first), first
    assert places[0].startswith("run      ")
    assert (refused.code, refused.stdout) == (2, "")
    assert "it is running, so it has no result" in refused.stderr


def test_the_link_of_a_run_is_shown_while_it_runs_and_what_is_missing_once_it_was_killed(
    there: Any, journal: Recorded
) -> None:
    run = journal("killed")
    opened = TrackingOutcome(experiment_id="1", run_id="5bf9", delivered=True)
    opened.fail(run.folder)
    opened.keep(run.folder)
    with closing(cut(run, after=reported(28))):
        running = there("show", "latest").stdout
    killed = there("show", "latest").stdout
    for text in (running, killed):
        assert "/#/experiments/1/runs/5bf9?" in text
    assert "not in MLflow yet" not in running
    assert "not in MLflow yet: some results (the driver was killed)" in killed


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (lambda event: isinstance(event, RunOpened), "running"),
        (lambda event: isinstance(event, TrialOpened) and event.trial == "main", "running, ddp, 2 workers"),
        (lambda event: isinstance(event, ModelSaved), "running, ddp, 2 workers, step 46/46, epoch "),
    ],
)
def test_show_knows_each_moment_of_a_run(
    there: Any, journal: Recorded, after: Callable[[Any], bool], said: str
) -> None:
    with closing(cut(journal("finished"), after=after)):
        shown = there("show", "latest")
    assert (shown.code, shown.stderr) == (0, "")
    assert said in shown.stdout.splitlines()[0]


def test_a_sweep_that_goes_on_is_shown(there: Any, journal: Recorded) -> None:
    run = journal("sweep")
    (run.folder / "result.json").unlink()
    with closing(cut(run, after=lambda event: True)):
        shown = there("show", "latest")
    assert (shown.code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{run.folder.name}: running\n")
