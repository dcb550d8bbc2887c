"""What `sync` makes of recorded runs in MLflow, looked at from all sides."""

# promise: contents of MLflow for every kind of run; no duplicates; the writer never blocks

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlflow
import pytest
import torch
from mlflow.entities import Run
from recordings import JOURNALS, LAB, Recording, Store, copied, recording

from pipeline.experiment.load import config_hash, flatten, load
from pipeline.experiment.reported import mlflow_name
from pipeline.protocol.events import ArtifactSaved, Failed, Finished
from pipeline.results.record import read
from pipeline.tracking.follow import sync
from pipeline.tracking.store import TrackingOutcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes"),  # MLflow's log_table on pandas 3
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),  # about MLflow's own code
]
NAMES = sorted(path.name for path in JOURNALS.iterdir() if (path / "events.jsonl").exists())
TRACKED = [name for name in NAMES if name != "killed"]
"""What was killed is not complete; one of these is the resumed run."""


class Sent(NamedTuple):
    """All recorded runs, and the store that they were sent to."""

    recordings: dict[str, Recording]
    outcomes: dict[str, TrackingOutcome]
    store: Store

    def run(self, name: str, *, role: str = "main") -> Run:
        """MLflow's run of a recording, or of one of its trials."""
        main = self.store.client.get_run(self.outcomes[name].run_id)
        if role == "main":
            return main
        return next(run for run in self.children(name) if run.data.tags["role"] == role)

    def children(self, name: str) -> list[Run]:
        run_id = self.outcomes[name].run_id
        experiment = [self.outcomes[name].experiment_id]
        return list(self.store.client.search_runs(experiment, filter_string=f"tags.`mlflow.parentRunId` = '{run_id}'"))

    def series(self, name: str, metric: str) -> list[tuple[int, float]]:
        return self.store.series(self.run(name), metric)

    def artifacts(self, name: str) -> set[str]:
        return {one.path for one in self.store.client.list_artifacts(self.outcomes[name].run_id)}


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Sent:
    lab = tmp_path_factory.mktemp("lab")
    store = copied(empty_store, lab)
    recordings = {name: recording(name, lab=lab) for name in TRACKED}
    told: list[str] = []
    sweep = recordings["sweep"].folder
    for folder in (sweep, *sorted(sweep.glob("trial-*"))):  # what it says of its trials needs them there
        sync(folder, warn=lambda _: None)
    outcomes = {name: sync(each.folder, warn=told.append) for name, each in recordings.items()}
    assert told == []
    return Sent(recordings, outcomes, store)


@pytest.mark.parametrize("name", TRACKED)
def test_each_run_is_there_whole(sent: Sent, name: str) -> None:
    events, run = sent.recordings[name].events, sent.run(name)
    closed: Any = events[-1]

    assert sent.outcomes[name].delivered
    assert (run.info.status, run.info.end_time) == (closed.status, round(closed.time * 1000))
    assert run.data.tags.get("mlflow.note.content", "").startswith(closed.message or closed.summary)
    for metric in ("train/loss", "validation/loss", "throughput/workers"):
        expected = sorted(sent.recordings[name].series(metric))
        assert str(sent.series(name, mlflow_name(metric))) == str(expected)  # as text, since NaN is unlike itself


def test_sending_again_adds_nothing(sent: Sent, lab: Path) -> None:
    before = [sent.store.contents(name) for name in ("tiny", "lab")]
    for each in sent.recordings.values():
        outcome = sync(each.folder, warn=pytest.fail)
        assert outcome.delivered
        assert f"/runs/{outcome.run_id}" in outcome.message
    assert [sent.store.contents(name) for name in ("tiny", "lab")] == before
    assert sum(map(len, before)) > 15


def test_there_is_one_run_with_a_child_for_each_measurement(sent: Sent) -> None:
    children = {child.data.tags["role"]: child for child in sent.children("finished")}

    assert set(children) == {"baseline", "reference"}
    assert {child.info.status for child in children.values()} == {"FINISHED"}
    assert "mlflow.parentRunId" not in sent.run("finished").data.tags
    for child in children.values():
        assert child.data.metrics["throughput/samples_per_second"] > 0
        assert child.data.metrics["time/step_ms"] > 0
        assert "time/exposed_communication_ms" not in child.data.metrics  # one process exchanges nothing
        assert "validation/accuracy" not in child.data.metrics
        assert len(sent.store.series(child, "train/loss")) == 18


def test_all_that_was_measured_is_there(sent: Sent) -> None:
    found = sent.run("finished").data.metrics
    (end,) = (event for event in sent.recordings["finished"].all_of(Finished) if event.trial == "main")

    for name in (
        "train/loss", "train/learning_rate", "validation/loss", "validation/accuracy", "time/data_wait_ms",
        "speedup", "efficiency", "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes",
    ):  # fmt: skip
        assert found[name] >= 0
    assert found["throughput/samples_per_second"] == end.result.samples_per_second.median
    assert found["time/exposed_communication_ms"] == end.result.parts.exposed_communication_ms
    assert found["time_to_first_step_s"] == end.time_to_first_step_s
    assert found["memory/peak_mib"] == max(end.result.peak_memory_mb)
    assert found["memory/peak_mib_rank_1"] == end.result.peak_memory_mb[1]
    assert [step for step, _ in sent.series("finished", "train/loss")] == list(range(1, 47))
    assert [step for step, _ in sent.series("finished", "validation/accuracy")] == [23, 46]
    assert found["validation/accuracy"] > 0.85


def test_tags_and_parameters_tell_what_ran(sent: Sent) -> None:
    run, folder = sent.run("finished"), sent.recordings["finished"].folder
    experiment = load(folder / "experiment.yaml").experiment

    tags = run.data.tags
    assert (tags["strategy"], tags["launcher"], tags["world_size"]) == ("ddp", "torchrun", "2")
    assert (tags["hardware"], tags["user"], tags["mlflow.user"]) == (tags["hardware"] or None, "user", "user")
    assert len(tags["config_hash"]) == len(config_hash(experiment))
    assert (tags["git_dirty"], len(tags["git_commit"])) == ("true", 40)
    assert tags["git_commit"] == tags["mlflow.source.git.commit"]
    params = run.data.params
    assert (params["train.epochs"], params["optimizer._target_"]) == ("2", "torch.optim.SGD")
    assert params["train_samples"] == "1438"
    assert {name.replace("[", "_").replace("]", "_") for name in flatten(experiment)} - params.keys() <= _later(params)


def _later(params: dict[str, str]) -> set[str]:
    """Keys of an experiment that a version has that is newer than the recording."""
    return {name for name in flatten(load(JOURNALS / "tiny.yaml").experiment) if name not in params}


def test_the_datasets_are_inputs(sent: Sent) -> None:
    inputs = {
        next(tag.value for tag in given.tags if tag.key == "mlflow.data.context"): given.dataset
        for given in sent.run("finished").inputs.dataset_inputs
    }
    assert json.loads(inputs["train"].profile) == {"num_rows": 1438}
    assert json.loads(inputs["validation"].profile) == {"num_rows": 359}
    assert inputs["train"].digest


def test_the_model_has_a_signature_and_predicts(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sent.store.uri)
    run, folder = sent.run("finished"), sent.recordings["finished"].folder
    (output,) = run.outputs.model_outputs
    logged = sent.store.client.get_logged_model(output.model_id)
    example = torch.load(folder / "model" / "example.pt")

    assert (logged.name, str(logged.status), logged.source_run_id) == ("tiny", "READY", run.info.run_id)
    signature = mlflow.models.get_model_info(logged.model_uri).signature
    assert signature.inputs.inputs[0].shape == (-1, *example.shape[1:])
    assert signature.outputs.inputs[0].shape == (-1, 10)
    assert f'load_model("{logged.model_uri}")' in logged.tags["mlflow.note.content"]
    assert ("validation/accuracy", 46) in [(metric.key, metric.step) for metric in logged.metrics]
    inputs = torch.cat([example, example, example])  # another batch size than the example's
    predicted = mlflow.pyfunc.load_model(logged.model_uri).predict(inputs.numpy())
    weights = torch.load(folder / "model" / "weights.pt")
    values = inputs.flatten(1)
    *hidden, last = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    for name in hidden:
        values = torch.relu(values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
    expected = values @ weights[f"{last}.weight"].T + weights[f"{last}.bias"]
    torch.testing.assert_close(torch.as_tensor(predicted), expected)


def test_the_files_are_there(sent: Sent, tmp_path: Path) -> None:
    run, folder = sent.run("finished"), sent.recordings["finished"].folder
    names = {saved.path for saved in sent.recordings["finished"].all_of(ArtifactSaved)}
    assert {"experiment.yaml", "environment.txt", "log.txt", "speedup_table.json", "report.html"} <= names
    assert names <= sent.artifacts("finished")
    there = Path(sent.store.client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    for name in names:
        assert (there / name).read_bytes() == (folder / name).read_bytes()
    table = json.loads((there / "speedup_table.json").read_text())
    assert {"trial", "speedup", "efficiency", "samples_per_second"} <= set(table["columns"])
    assert len(table["data"]) == 3
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "speedup_table.json", "type": "table"}]
    other = sent.store.client.create_run(run.info.experiment_id).info.run_id  # MLflow's own way with such a table
    columns = zip(*table["data"], strict=True)
    sent.store.client.log_table(other, dict(zip(table["columns"], columns, strict=True)), "speedup_table.json")
    assert (
        sent.store.client.get_run(other).data.tags["mlflow.loggedArtifacts"] == run.data.tags["mlflow.loggedArtifacts"]
    )
    sent.store.client.delete_run(other)


def test_the_description_is_made_for_people(sent: Sent) -> None:
    run, rates = sent.run("finished"), rates_of(sent.recordings["finished"])
    assert "ddp x 2 does" in run.data.tags["mlflow.note.content"]
    assert "| strategy |" in run.data.tags["mlflow.note.content"]
    (main,), (baseline,) = rates["main"], rates["baseline"]
    assert run.data.metrics["speedup"] == pytest.approx(main / baseline)


def rates_of(run: Recording) -> dict[str, list[float]]:
    """The measured throughput of each trial, of each of its repeats."""
    rates: dict[str, list[float]] = {}
    for end in run.all_of(Finished):
        rates.setdefault(end.result.trial, []).append(end.result.samples_per_second.median)
    return rates


def test_a_figure_of_the_whole_run_is_no_series(sent: Sent) -> None:
    """At step 0 MLflow draws bars, at any other step a line of one dot."""
    run = sent.run("finished")
    for name in (
        "speedup",
        "efficiency",
        "time/compute_ms",
        "memory/peak_mib",
        "memory/peak_mib_rank_1",
    ):
        assert sent.series("finished", name) == [(0, run.data.metrics[name])]
    assert len(sent.series("finished", "throughput/samples_per_second")) > 1


def test_a_failed_run_has_the_error_of_the_rank_that_failed_first(sent: Sent) -> None:
    first, *_ = sent.recordings["failed"].all_of(Failed)
    assert first.rank.rank == 1
    run = sent.run("failed")
    assert (run.info.status, run.data.tags["error"]) == (
        "FAILED", "rank 1 on node-1: ZeroDivisionError: the model's own mistake"
    )  # fmt: skip
    assert [(child.data.tags["role"], child.info.status) for child in sent.children("failed")] == [
        ("baseline", "FINISHED")
    ]
    assert "the loss is nan in step 3" in sent.run("nan-stopped").data.tags["error"]


def test_steps_done_twice_are_there_once(sent: Sent) -> None:
    for name, steps in (("resumed", 100), ("elastic", 300)):
        recorded = [step for step, _ in sent.recordings[name].series("train/loss")]
        assert recorded == list(range(1, steps + 1))
        assert [step for step, _ in sent.series(name, "train/loss")] == recorded
    workers = [value for _, value in sent.series("elastic", "throughput/workers")]
    assert [size for i, size in enumerate(workers) if workers[i - 1 : i] != [size]] == [1, 2, 1]
    assert sent.run("elastic").data.tags["world_size"] == "1"


def test_a_comparison_has_a_run_for_each_cell(sent: Sent) -> None:
    recorded = sent.recordings["comparison"]
    rates = rates_of(recorded)
    children = {child.data.tags["pipeline.trial"]: child for child in sent.children("comparison")}
    assert {child.info.run_name for child in children.values()} == {
        "baseline: 1 worker", "ddp, 1 worker", "ddp, 2 workers", "reference: 1 process, 2 cores"
    }  # fmt: skip
    assert set(children) == set(rates)
    for name, child in children.items():
        told = [value for _, value in recorded.series("speedup", trial=name)]
        assert len(told) == (name != "baseline")
        assert child.data.metrics.get("speedup") == next(iter(told), None)
        ratios = [own / base for own, base in zip(rates[name], rates["baseline"], strict=True)]
        assert told == ([] if name == "baseline" else [pytest.approx(median(ratios))])  # as the recording's version did
        assert child.data.metrics["throughput/samples_per_second"] == pytest.approx(median(rates[name]))


def test_a_sweep_has_a_run_for_each_trial_and_marks_the_best(sent: Sent) -> None:
    folder, parent = sent.recordings["sweep"].folder, sent.run("sweep")
    swept = read(folder)
    best_trial = swept and swept.fact("best_trial")
    assert best_trial is not None
    trials = {child.data.tags["pipeline.run"].rpartition("/")[2]: child for child in sent.children("sweep")}

    assert set(trials) == {"trial-001", "trial-002", "trial-003"}
    assert {name: run.data.params["optimizer.lr"] for name, run in trials.items()} == {
        "trial-001": "0.1", "trial-002": "0.05", "trial-003": "1e-06"
    }  # fmt: skip
    assert trials["trial-003"].info.run_name == "trial 3: optimizer.lr=1e-06"
    best = f"trial-{best_trial.value:03.0f}"
    assert [name for name, run in trials.items() if run.data.tags.get("best") == "true"] == [best]
    assert parent.data.tags["best_run_id"] == trials[best].info.run_id
    assert parent.data.metrics["validation/loss"] == trials[best].data.metrics["validation/loss"]
    assert trials["trial-003"].info.status == "KILLED"
    assert trials["trial-003"].data.tags["stopped_early"].startswith("stopped early by ASHA")
    assert {"result.json", "experiment.yaml", "log.txt"} <= sent.artifacts("sweep")


def test_a_filter_finds_the_trials_of_a_sweep(sent: Sent) -> None:
    outcome, sweep = sent.outcomes["sweep"], sent.recordings["sweep"].folder.name
    found = sent.store.client.search_runs([outcome.experiment_id], filter_string=f"tags.sweep = '{sweep}'")
    assert {run.info.run_id for run in found} == {run.info.run_id for run in sent.children("sweep")}


def test_a_killed_run_ends_with_its_last_event_and_goes_on_when_it_is_resumed(
    journal: Callable[[str], Recording], store: Store, lab: Path
) -> None:
    killed = journal("killed")
    outcome = sync(killed.folder, warn=pytest.fail)
    run = store.client.get_run(outcome.run_id)
    assert (run.info.status, run.info.end_time) == ("KILLED", round(killed.events[-1].time * 1000))
    assert store.series(run, "train/loss") == killed.series("train/loss")

    resumed = (JOURNALS / "resumed" / "events.jsonl").read_text().replace(LAB, str(lab))
    resumed = resumed.replace('"train.epochs":"25"', '"train.epochs":"26"')  # as MLflow keeps a parameter's first value
    (killed.folder / "events.jsonl").write_text(resumed)
    again = sync(killed.folder, warn=lambda _: None)  # of files that the copy lacks
    assert again.run_id == outcome.run_id
    (run,) = store.runs("lab")
    assert run.info.status == "FINISHED"
    assert [step for step, _ in store.series(run, "train/loss")] == list(range(1, 101))
    assert (run.data.params["train.epochs"], run.data.tags["changed.train.epochs"]) == ("25", "26")
