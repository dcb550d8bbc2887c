"""``pipeline sweep`` as a whole: real trials side by side, ASHA, MLflow, and what is looked at afterwards."""

# promise: `sweep` under Ray Tune, stopped early, resumed

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from command import REPOSITORY, Ended, started
from mlflow import MlflowClient
from swept import INPROCESS, Folder, section

from pipeline.protocol.events import CheckpointSaved, RunClosed
from pipeline.results.record import Fact

MLP = REPOSITORY / "experiments" / "mlp.yaml"
PATIENCE_S = 230.0


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, Ended]:
    """Three trials, two side by side; the third can't learn, and begins when a better one has ended."""
    cwd = tmp_path_factory.mktemp("sweep")
    rates = {"grid": [0.1, 0.05, 1e-6]}
    overrides = [
        *INPROCESS,
        "train.epochs=30",
        section(parameters={"optimizer.lr": rates}, asha={"reduction_factor": 2}),
    ]
    process = started("sweep", MLP, *overrides, cwd=cwd)
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return Folder(cwd), Ended(process.returncode, stdout, stderr)


def test_trials_run_side_by_side_and_the_worst_is_stopped_early(swept: tuple[Folder, Ended]) -> None:
    folder, ended = swept
    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output

    assert [values["optimizer.lr"] for values in folder.values] == [0.1, 0.05, 1e-6]
    assert folder.states[3] == "stopped early"
    assert max(folder.epochs(3)) < 30
    assert folder.of(3, RunClosed)[0].status == "KILLED"
    assert folder.of(3, RunClosed)[0].message.startswith("stopped early by ASHA after epoch ")
    assert folder.of(3, CheckpointSaved)  # though Ray has ended the actor that started it

    assert folder.states[folder.best] == "completed"
    best, *others = folder.result.tables[0].rows
    assert best[:1] == (str(folder.best),)
    assert best[2:4] == ("30", "completed")
    values = [row[1].value for row in (best, *others) if row[3] == "completed" and isinstance(row[1], Fact)]
    assert values[0] == min(value or 0.0 for value in values)

    first, second = folder.events(1), folder.events(2)
    assert first[0].time < second[-1].time
    assert second[0].time < first[-1].time
    assert all(not [e for e in folder.events(n) if getattr(e, "trial", "") == "baseline"] for n in (1, 2, 3))


def test_mlflow_has_one_parent_with_children_and_marks_the_best(swept: tuple[Folder, Ended]) -> None:
    folder, ended = swept
    runs = folder.children
    parent = runs.pop(folder.sweep.name)
    assert set(runs) == {"trial-001", "trial-002", "trial-003"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {name: run.data.params["optimizer.lr"] for name, run in runs.items()} == {
        "trial-001": "0.1", "trial-002": "0.05", "trial-003": "1e-06"
    }  # fmt: skip
    assert runs["trial-003"].info.run_name == "trial 3: optimizer.lr=1e-06"

    best = f"trial-{folder.best:03}"
    assert [name for name, run in runs.items() if run.data.tags.get("best") == "true"] == [best]
    assert parent.data.tags["best_run_id"] == runs[best].info.run_id
    assert parent.data.tags["best.optimizer.lr"] == runs[best].data.params["optimizer.lr"]
    assert parent.data.metrics["validation/loss"] == runs[best].data.metrics["validation/loss"]
    assert runs["trial-003"].info.status == "KILLED"
    assert [name for name, run in runs.items() if run.outputs and run.outputs.model_outputs] == [best]
    assert "Its model is logged to MLflow" in ended.stdout
    assert runs["trial-003"].data.tags["stopped_early"].startswith("stopped early by ASHA")
    assert parent.info.status == "FINISHED"
    artifacts = {
        one.path for one in MlflowClient(f"sqlite:///{folder.path}/mlflow.db").list_artifacts(parent.info.run_id)
    }
    assert {"result.json", "report.html", "experiment.yaml", "log.txt"} <= artifacts
    assert parent.data.metrics["validation/accuracy"] == runs[best].data.metrics["validation/accuracy"]
    assert parent.data.tags["launcher"] == "inprocess"
    assert "optimizer.lr" not in parent.data.params
    assert parent.data.tags["mlflow.note.content"].startswith(f"**Best: trial {folder.best} of 3, ")
    assert "3 of 3 trials completed" in ended.stdout


def test_the_table_fits_a_terminal_and_names_the_command_that_trains_the_best_again(
    swept: tuple[Folder, Ended], command: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ended = swept
    lines = ended.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("trial ") and "status" in line)
    assert max(map(len, lines[begin : begin + 5])) <= 80
    assert lines[begin].split() == ["trial", "validation/loss", "epochs", "status", "lr"]
    again = ended.stdout.partition("RETRAIN  ")[2].partition("\n\n")[0].partition("\nCONFIRM")[0]
    assert again.startswith("pipeline run ")
    assert again.endswith(f"optimizer.lr={folder.values[folder.best - 1]['optimizer.lr']}")
    assert "sweep=" not in again

    monkeypatch.chdir(folder.path)
    shown = command("show", "latest")
    assert again in shown.stdout
    assert lines[begin] in shown.stdout
    assert json.loads(command("show", "latest", "--json").stdout)["kind"] == "sweep"
    for name, text in folder.result.next:  # the two best are experiments that compare takes
        if name == "CONFIRM":
            plan = command(*shlex.split(text)[1:], "--dry-run")
            assert plan.code == 0, plan.output


def test_list_show_and_compare_know_the_trials(
    swept: tuple[Folder, Ended], command: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = swept
    monkeypatch.chdir(folder.path)
    name = folder.sweep.name
    runs = json.loads(command("list", "--json").stdout)
    assert [run["run"] for run in runs] == [name, *(f"{name}/trial-{n:03}" for n in (1, 2, 3))]
    assert [run["command"] for run in runs] == ["sweep", "run", "run", "run"]
    table = command("list").stdout.splitlines()
    assert [line.split()[0] for line in table[-4:]] == [name, "trial-001", "trial-002", "trial-003"]
    ends = ["FINISHED" if state == "completed" else "STOPPED" for state in folder.states.values()]
    assert [run["status"] for run in runs] == ["FINISHED", *ends]  # ASHA may stop the second trial, too
    assert "validation/loss" in command("show", f"{name}/trial-001").stdout
    difference = json.loads(command("compare", f"{name}/trial-001", f"{name}/trial-002", "--json").stdout)
    assert ["optimizer.lr", "0.1", "0.05"] in difference["tables"][0]["rows"]
    again = command("run", str(MLP), "--resume", *INPROCESS, f"tracking.directory={folder.path}/runs")
    assert "has no run of mlp-digits" in again.stderr  # a trial of a sweep is not gone on with by chance


def test_what_is_not_there_is_told_before_anything_starts(command: Callable[..., Ended], tmp_path: Path) -> None:
    there = (f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/m.db")
    rates = section(parameters={"optimizer.lr": {"grid": [0.1, 0.2]}}, concurrent=99)
    none = command("sweep", "lab.yaml", *there)
    assert (none.code, "lab.yaml: sweep: missing. Write the values to try" in none.stderr) == (2, True)
    many = command("sweep", "lab.yaml", rates, *there)
    assert many.code == 3
    assert "99 trials of 1 worker with 1 core each don't fit at the same time" in many.stderr
    resumed = command("sweep", "lab.yaml", rates.replace("99", "1"), "--resume", *there)
    assert (resumed.code, "has no sweep of lab" in resumed.stderr) == (2, True)
    plan = command("sweep", "lab.yaml", rates.replace("99", "1"), "--dry-run", *there)
    assert plan.code == 0
    assert "concurrent   1 trial, each 1 worker with inprocess, " in plan.stdout
    assert "trial 2: optimizer.lr=0.2" in plan.stdout
    assert not (tmp_path / "runs").exists()


def test_run_says_that_it_leaves_the_sweep_out(command: Callable[..., Ended], tmp_path: Path) -> None:
    plan = command("run", "lab.yaml", section(parameters={"optimizer.lr": {"grid": [0.1, 0.2]}}), "--dry-run")
    assert "This run uses the values of the file. To search the values of its sweep section" in " ".join(
        plan.stdout.split()
    )
