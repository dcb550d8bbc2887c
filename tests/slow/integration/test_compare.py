"""``pipeline benchmark FILE`` as a whole: the matrix under torchrun, its JSON, its runs in MLflow, its failures."""

# promise: `benchmark`: its failures, Ctrl-C

import json
import signal
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import pytest
from command import REPOSITORY, Ended, started
from mlflow import MlflowClient

from pipeline.protocol import estimates
from pipeline.protocol.events import Finished, RunClosed, TrialOpened
from pipeline.record import journal

MLP = REPOSITORY / "experiments" / "mlp.yaml"
REPEATS = 2


class Compared(NamedTuple):
    cwd: Path
    folder: Path
    ended: Ended

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        return self.ended.facts


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """In fp64, where the same training gives the same losses."""
    cwd = tmp_path_factory.mktemp("compared")
    wishes = ["--strategies", "single,ddp", "--workers", "2,64", "--repeats", str(REPEATS)]
    process = started("benchmark", MLP, "train.precision=fp64", *wishes, "--json", "--profile", cwd=cwd)
    stdout, stderr = process.communicate(timeout=230)
    (folder,) = (cwd / "runs").iterdir()
    return Compared(cwd, folder, Ended(process.returncode, stdout, stderr))


def test_each_configuration_is_a_row_or_has_a_reason(compared: Compared) -> None:
    assert compared.ended.code == 0, compared.ended.output
    (table, *_) = json.loads(compared.ended.stdout)["tables"]
    names = ["1 worker (baseline)", "1 process, both cores", "2 workers (ddp)", "64 workers (ddp)"]
    assert [row[0] for row in table["rows"]] == names
    assert set(compared.facts) == {"main", "baseline", "reference", "ddp-2"}
    assert compared.facts["main"]["speedup"] | {"trial": "ddp-2"} == compared.facts["ddp-2"]["speedup"]
    assert any(note.startswith("64 workers (ddp) was not measured: 64 workers with") for note in table["notes"])


def test_the_measurements_took_turns(compared: Compared) -> None:
    opened = [event for event in journal.read(compared.folder / journal.FILE_NAME) if isinstance(event, TrialOpened)]
    names = ["baseline", "ddp-2", "reference"]
    assert [(event.trial, event.repeat) for event in opened] == [(n, r) for r in range(REPEATS) for n in names]


def test_a_speedup_is_that_of_neighbouring_measurements_with_its_interval(compared: Compared) -> None:
    ends = [event.result for event in journal.read(compared.folder / journal.FILE_NAME) if isinstance(event, Finished)]
    rates = {name: [e.samples_per_second.median for e in ends if e.trial == name] for name in ("baseline", "ddp-2")}
    expected = estimates.ratio(list(zip(rates["ddp-2"], rates["baseline"], strict=True)))
    facts = compared.facts["ddp-2"]
    speedup = facts["speedup"]
    assert speedup["value"] == pytest.approx(geometric_mean(rates["ddp-2"]) / geometric_mean(rates["baseline"]))
    assert facts["speedup_rounds"]["value"] == REPEATS
    assert (speedup["low"], speedup["high"]) == pytest.approx((expected.low, expected.high))
    assert facts["efficiency"]["value"] == pytest.approx(speedup["value"] / 2)


def test_two_workers_train_the_same_as_one(compared: Compared) -> None:
    assert compared.facts["ddp-2"]["largest_loss_difference"]["value"] < 1e-12


def test_each_configuration_has_its_parts(compared: Compared) -> None:
    for name in ("baseline", "ddp-2"):
        facts = {key: fact["value"] for key, fact in compared.facts[name].items()}
        assert facts["compute_ms"] > 0
        assert min(facts["data_wait_ms"], facts["rest_ms"]) >= 0
        assert (facts.get("exposed_communication_ms") is not None) == (name == "ddp-2")


def test_one_parent_with_the_report_and_a_child_for_each_cell(compared: Compared, tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{compared.cwd}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'mlp-digits'")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = {run.info.run_name: run for run in runs if run is not parent}

    assert set(children) == {"baseline: 1 worker", "ddp, 2 workers", "reference: 1 process, 2 cores"}
    assert parent.info.run_name == "benchmark"
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    facts = {key: fact["value"] for key, fact in compared.facts["ddp-2"].items()}
    speedup, rate = facts["speedup"], facts["samples_per_second"]
    assert (parent.data.metrics["speedup"], parent.data.metrics["samples_per_second"]) == (speedup, rate)
    assert children["ddp, 2 workers"].data.metrics["samples_per_second"] == rate  # the mean of the repeats
    assert children["ddp, 2 workers"].data.metrics["speedup"] == speedup
    assert parent.data.tags["role"] == "benchmark"
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files >= {"result.json", "speedup_table.json", "report.html", "experiment.yaml", "log.txt"}
    assert "2 workers (ddp)" in parent.data.tags["mlflow.note.content"]
    history = client.get_metric_history(children["ddp, 2 workers"].info.run_id, "train/loss")
    assert max(point.step for point in history) == 18
    (trace,) = client.list_artifacts(children["ddp, 2 workers"].info.run_id, "traces")
    assert trace.path == "traces/ddp-2.json.gz"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train.global_batch_size=60"], "an epoch has 50 samples, fewer than the global batch of 60"),
        (["train.epochs=1"], "50 samples make 4 steps of 16 in 1 epoch; a measurement needs 8"),
    ],
)
def test_too_few_samples(command: Any, arguments: list[str], told: str) -> None:
    ended = command("benchmark", "lab.yaml", *arguments)
    assert ended.code == 2
    assert told in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.output


def test_a_cell_that_fails_leaves_the_others(command: Any) -> None:
    """A model that only breaks on the second worker."""
    ddp = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "parallel.cpus_per_worker=1"]
    ended = command("benchmark", "lab.yaml", "model.fault=raises", "model.rank=1", *ddp, "--repeats", "2", "--json")

    assert ended.code == 1
    assert "samples_per_second" in ended.facts["baseline"]
    assert "2 workers (ddp) was not measured: it failed: rank 1 on " in ended.stdout
    assert "ZeroDivisionError: the model's own mistake" in ended.stderr


def test_a_batch_without_memory_is_a_row_with_the_reason(command: Any) -> None:
    """The file's batch of 8 per worker does not fit on the second rank."""
    ddp = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "train.epochs=9"]
    hungry = ["model={_target_: lab.Hungry, limit: 3, rank: 1}"]
    ended = command("benchmark", "lab.yaml", *ddp, *hungry, "--batch-sizes", "4,2", "--repeats", "2", "--json")
    assert ended.code == 0, ended.output
    for name in ("2 workers (ddp)", "2 workers (ddp, batch 4)"):
        assert f"{name} was not measured: it does not fit into memory." in ended.stdout
    assert ended.facts["ddp-2-batch-2"]["speedup_rounds"]["value"] == 2


def test_ctrl_c_keeps_and_reports_the_finished_cells(start: Any, tmp_path: Path) -> None:
    lasting = ["train.epochs=20", "benchmark.steps=200", "parallel.launcher=torchrun"]  # a cell is not over at once
    process = start("benchmark", MLP, *lasting, "--repeats", "50", "--json", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(_opened(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    ended = Ended(process.returncode, stdout, stderr)

    assert ended.code == 130, stderr
    assert "samples_per_second" in ended.facts["baseline"]
    assert "2 workers (ddp) was not measured: the benchmark ended before it was measured." in stdout
    (folder,) = (tmp_path / "runs").iterdir()
    *_, last = journal.read(folder / journal.FILE_NAME)
    assert isinstance(last, RunClosed)
    assert last.status == "KILLED"


def _opened(cwd: Path) -> list[TrialOpened]:
    journals = [folder / journal.FILE_NAME for folder in (cwd / "runs").glob("*")]
    return [e for path in journals if path.exists() for e in journal.read(path) if isinstance(e, TrialOpened)]
