"""One whole run under Ray, looked at from all sides: MLflow, the run's folder, the terminal."""

# promise: a run under Ray with MLflow: runs, children, metrics, model with a signature, report, chart, `pipeline ui`

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.experiment.load import config_hash, flatten, load
from pipeline.protocol.events import Finished, RunClosed, RunOpened, TrialOpened
from pipeline.record import journal
from pipeline.results import record

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),  # about MLflow's own code
]

STEPS = 115  # 5 epochs of 23 steps


@pytest.fixture(scope="module")
def client(whole_run: Any) -> MlflowClient:
    return MlflowClient(f"sqlite:///{whole_run.cwd}/mlflow.db")


@pytest.fixture(scope="module")
def runs(client: MlflowClient) -> dict[str, Run]:
    """By role."""
    (experiment,) = client.search_experiments(filter_string="name = 'mlp-digits'")
    return {run.data.tags["role"]: run for run in client.search_runs([experiment.experiment_id])}


@pytest.fixture(scope="module")
def main(runs: dict[str, Run]) -> Run:
    return runs["main"]


@pytest.fixture(scope="module")
def artifacts(client: MlflowClient, main: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    return Path(client.download_artifacts(main.info.run_id, "", str(folder)))


def test_it_succeeds(whole_run: Any) -> None:
    assert whole_run.ended.code == 0, whole_run.ended.output
    assert "Traceback" not in whole_run.ended.stderr


def test_it_prints_the_report_and_where_to_look(whole_run: Any) -> None:
    stdout = whole_run.ended.stdout

    screen = stdout
    assert screen.startswith("mlp-digits: training completed (5 epochs, 115 steps; ")
    assert len(screen.splitlines()) <= 24
    assert max(map(len, screen.splitlines())) <= 80
    for word in ("\nRESULT   ", "validation/accuracy", "2 workers (ddp)", "1 process, "):
        assert word in screen
    assert f"Report   runs/{whole_run.folder.name}/report.html" in screen


def test_there_is_one_run_with_a_child_for_each_measurement(runs: dict[str, Run], main: Run) -> None:
    parents = {role: run.data.tags.get("mlflow.parentRunId") for role, run in runs.items()}

    assert parents == {"main": None, "baseline": main.info.run_id, "reference": main.info.run_id}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}


@pytest.mark.parametrize(
    "name",
    [
        "train/loss",
        "train/learning_rate",
        "validation/loss",
        "validation/accuracy",
        "samples_per_second",
        "step_ms",
        "throughput/samples_per_second",
        "time/step_ms",
        "time/exposed_communication_ms",
        "time/data_wait_ms",
        "time_to_first_step_s",
        "memory/peak_mib",
        "speedup",
        "efficiency",
        "goodput",
        "tflops",
        "badput/startup",
        "badput/checkpointing",
        "time/window_data_wait_ms",
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
    ],
)
def test_the_metric_is_there(main: Run, name: str) -> None:
    assert main.data.metrics[name] >= 0


def test_the_loss_of_each_step_is_there(client: MlflowClient, main: Run) -> None:
    """In a file; the curve has a few points a second, the last one at the end of the training."""
    losses = np.load(client.download_artifacts(main.info.run_id, "losses.npy"))
    history = {point.step: point.value for point in client.get_metric_history(main.info.run_id, "train/loss")}

    assert losses.shape == (STEPS,)
    assert np.isfinite(losses).all()
    assert max(history) == STEPS
    assert {23, 46, 69, 92} <= history.keys()  # the ends of the epochs
    assert history[1] == losses[0]


def test_evaluation_is_there_for_each_epoch(client: MlflowClient, main: Run) -> None:
    history = client.get_metric_history(main.info.run_id, "validation/accuracy")

    assert sorted(metric.step for metric in history) == [23, 46, 69, 92, 115]
    assert main.data.metrics["validation/accuracy"] > 0.9


def test_children_have_what_they_measured(runs: dict[str, Run]) -> None:
    for role in ("baseline", "reference"):
        metrics = runs[role].data.metrics
        assert metrics["samples_per_second"] > 0
        assert metrics["step_ms"] > 0
        assert "time/exposed_communication_ms" not in metrics  # one process exchanges nothing
        assert "validation/accuracy" not in metrics


def test_tags_tell_what_ran(main: Run) -> None:
    tags = main.data.tags
    experiment = load(Path(__file__).parents[3] / "experiments" / "mlp.yaml").experiment

    assert (tags["strategy"], tags["launcher"], tags["world_size"]) == ("ddp", "ray", "2")
    assert tags["hardware"]
    assert len(tags["config_hash"]) == len(config_hash(experiment))
    assert tags["git_dirty"] == "true"
    assert tags["git_commit"] == tags["mlflow.source.git.commit"]
    assert len(tags["git_commit"]) == 40


def test_params_are_the_flat_configuration(main: Run, whole_run: Any) -> None:
    flat = flatten(load(whole_run.folder / "experiment.yaml").experiment)

    assert main.data.params["train.epochs"] == "5"
    assert main.data.params["optimizer._target_"] == "torch.optim.SGD"
    assert {name.replace("[", "_").replace("]", "_") for name in flat} <= main.data.params.keys()


def test_the_datasets_are_inputs(main: Run) -> None:
    inputs = {
        next(tag.value for tag in given.tags if tag.key == "mlflow.data.context"): given.dataset
        for given in main.inputs.dataset_inputs
    }

    assert json.loads(inputs["train"].profile) == {"num_rows": 1438}
    assert json.loads(inputs["validation"].profile) == {"num_rows": 359}
    assert inputs["train"].digest


def test_the_model_has_a_signature(
    client: MlflowClient, main: Run, whole_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predictions are in test_sent.py."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)
    (output,) = main.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    example = torch.load(whole_run.folder / "model" / "example.pt")

    signature = mlflow.models.get_model_info(model.model_uri).signature

    assert signature.inputs.inputs[0].shape == (-1, *example.shape[1:])
    assert signature.outputs.inputs[0].shape == (-1, 10)


@pytest.mark.parametrize(
    "name",
    [
        "experiment.yaml",
        "environment.txt",
        "log.txt",
        "result.json",
        "speedup_table.json",
        "report.html",
    ],
)
def test_the_artifact_is_there_and_in_the_folder(artifacts: Path, whole_run: Any, name: str) -> None:
    assert (artifacts / name).stat().st_size > 0
    assert (whole_run.folder / name).read_bytes().startswith((artifacts / name).read_bytes())


def test_the_report_stands_alone(artifacts: Path) -> None:
    page = (artifacts / "report.html").read_text()

    assert page.count("<svg ") == 3
    assert "src=" not in page


def test_the_table_is_shown_as_one(artifacts: Path, main: Run) -> None:
    table = json.loads((artifacts / "speedup_table.json").read_text())

    assert {"trial", "speedup", "efficiency", "samples_per_second"} <= set(table["columns"])
    assert len(table["data"]) == 3
    assert json.loads(main.data.tags["mlflow.loggedArtifacts"]) == [{"path": "speedup_table.json", "type": "table"}]


def test_the_speedup_is_the_ratio_of_what_was_measured(artifacts: Path, main: Run, runs: dict[str, Run]) -> None:
    result = record.read(artifacts)
    assert result is not None
    rates = {fact.trial: fact.value for fact in result.all_facts if fact.key == "samples_per_second"}
    throughput = {role: run.data.metrics["samples_per_second"] for role, run in runs.items()}

    assert main.data.metrics["speedup"] == pytest.approx(throughput["main"] / throughput["baseline"])
    assert main.data.metrics["efficiency"] == pytest.approx(throughput["main"] / throughput["baseline"] / 2)
    assert throughput == pytest.approx(rates)


def test_the_speedup_was_measured_in_turn(artifacts: Path, main: Run, whole_run: Any) -> None:
    result = record.read(artifacts)
    assert result is not None
    ends = {
        event.trial: event.result
        for event in journal.read(whole_run.folder / journal.FILE_NAME)
        if isinstance(event, Finished)
    }
    took = len(ends["main"].slots)
    assert 2 <= took <= 3  # fewer where three times the budget is over, on a busy machine
    assert {name: len(result.slots) for name, result in ends.items()} == dict.fromkeys(ends, took)
    assert ends.keys() == {"main", "baseline", "reference"}
    low, high, pairs = (main.data.metrics[name] for name in ("speedup_ci_low", "speedup_ci_high", "speedup_rounds"))
    assert low <= main.data.metrics["speedup"] <= high
    speedup = result.fact("speedup")
    assert speedup is not None
    assert (low, high, pairs) == pytest.approx((speedup.low, speedup.high, took))


def test_the_description_holds_the_summary(main: Run) -> None:
    note = main.data.tags["mlflow.note.content"]

    assert note.startswith("**2 workers (ddp): ")
    assert "samples/s" in note


def test_the_environment_can_be_installed_again(artifacts: Path) -> None:
    lines = (artifacts / "environment.txt").read_text().splitlines()

    assert f"torch=={version('torch')}" in lines  # torch.__version__ may name a build that the package does not
    assert all("==" in line for line in lines[1:])


def test_the_resolved_experiment_is_the_experiment(artifacts: Path, main: Run) -> None:
    assert config_hash(load(artifacts / "experiment.yaml").experiment) == main.data.tags["config_hash"]


def test_the_weights_are_in_the_folder(whole_run: Any) -> None:
    """MLflow has them as part of the model."""
    weights = torch.load(whole_run.folder / "model" / "weights.pt")

    assert sum(value.numel() for value in weights.values()) == 8970


def test_the_journal_tells_the_whole_story(whole_run: Any) -> None:
    events = list(journal.read(whole_run.folder / journal.FILE_NAME))

    assert isinstance(events[0], RunOpened)
    assert [event.trial for event in events if isinstance(event, TrialOpened)] == ["main", "baseline", "reference"]
    assert [event.trial for event in events if isinstance(event, Finished)] == ["main", "baseline", "reference"]
    assert isinstance(events[-1], RunClosed)
    assert events[-1].status == "FINISHED"
    assert not journal.is_open(whole_run.folder / journal.FILE_NAME)


def test_no_secret_stays_behind(whole_run: Any) -> None:
    """The workers' way to the driver is a key in a file while they run."""
    assert not list(whole_run.folder.rglob("*.channel"))


def test_the_log_holds_what_the_terminal_showed(whole_run: Any) -> None:
    log = (whole_run.folder / "log.txt").read_text()

    assert "ddp, 2 workers: done, 115 steps" in log


def test_sync_adds_nothing_twice(whole_run: Any, command: Callable[..., Any]) -> None:
    client = MlflowClient(f"sqlite:///{whole_run.cwd}/mlflow.db")

    def everything() -> dict[str, tuple[object, ...]]:
        (experiment,) = client.search_experiments(filter_string="name = 'mlp-digits'")
        runs = client.search_runs([experiment.experiment_id])
        return {
            run.info.run_id: (
                run.info.status,
                run.info.end_time,
                run.data.params,
                run.data.tags,
                len(client.get_metric_history(run.info.run_id, "train/loss")),
                len(client.get_metric_history(run.info.run_id, "throughput/samples_per_second")),
                len(run.inputs.dataset_inputs),
                len(run.outputs.model_outputs) if run.outputs else 0,
            )
            for run in runs
        }

    before = everything()
    ended = command("sync", str(whole_run.folder))

    assert ended.code == 0, ended.output
    assert len(before) == 3
    assert everything() == before
