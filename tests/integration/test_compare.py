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
KEYS = {
    "strategy", "workers", "measured", "reason", "samples_per_second", "speedup", "efficiency", "spread",
    "step_ms", "exposed_communication_ms", "data_wait_ms", "peak_memory_mb", "time_to_first_step_s",
    "largest_loss_difference",
}  # fmt: skip


class Compared(NamedTuple):
    cwd: Path
    folder: Path
    ended: Ended

    @property
    def json(self) -> Any:
        return json.loads(self.ended.stdout)

    def cell(self, strategy: str, workers: int) -> Any:
        (cell,) = (cell for cell in self.json["cells"] if (cell["strategy"], cell["workers"]) == (strategy, workers))
        return cell


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """In fp64, where the same training gives the same losses."""
    cwd = tmp_path_factory.mktemp("compared")
    wishes = ["--strategies", "single,ddp", "--workers", "2,64", "--repeats", str(REPEATS)]
    process = started("benchmark", MLP, "train.precision=fp64", *wishes, "--json", "--profile", cwd=cwd)
    stdout, stderr = process.communicate(timeout=230)
    (folder,) = (cwd / "runs").iterdir()
    return Compared(cwd, folder, Ended(process.returncode, stdout, stderr))


def test_it_succeeds_and_prints_one_document(compared: Compared) -> None:
    assert compared.ended.code == 0, compared.ended.output
    assert set(compared.json) >= {"cells", "advice"}
    assert all(set(cell) >= KEYS for cell in compared.json["cells"])


def test_each_cell_is_measured_or_has_a_reason(compared: Compared) -> None:
    cells = {(cell["strategy"], cell["workers"]): cell for cell in compared.json["cells"]}
    assert list(cells) == [("single", 1), ("ddp", 2), ("ddp", 64)]
    for (_, workers), cell in cells.items():
        assert cell["measured"] is (workers < 64)
        assert (cell["reason"] is None) is cell["measured"]
        assert (cell["samples_per_second"] is None) is not cell["measured"]
    assert "64 workers with" in compared.cell("ddp", 64)["reason"]


def test_the_measurements_took_turns(compared: Compared) -> None:
    opened = [event for event in journal.read(compared.folder / journal.FILE_NAME) if isinstance(event, TrialOpened)]
    names = ["baseline", "ddp-2", "reference"]
    assert [(event.trial, event.repeat) for event in opened] == [(n, r) for r in range(REPEATS) for n in names]


def test_a_speedup_is_that_of_neighbouring_measurements_with_its_interval(compared: Compared) -> None:
    ends = [event.result for event in journal.read(compared.folder / journal.FILE_NAME) if isinstance(event, Finished)]
    rates = {name: [e.samples_per_second.median for e in ends if e.trial == name] for name in ("baseline", "ddp-2")}
    expected = estimates.ratio(list(zip(rates["ddp-2"], rates["baseline"], strict=True)))
    cell = compared.cell("ddp", 2)

    assert cell["speedup"] == pytest.approx(geometric_mean(rates["ddp-2"]) / geometric_mean(rates["baseline"]))
    assert cell["speedup_rounds"] == REPEATS
    assert (cell["speedup_ci_low"], cell["speedup_ci_high"]) == pytest.approx((expected.low, expected.high))
    assert cell["efficiency"] == pytest.approx(cell["speedup"] / 2)


def test_two_workers_train_the_same_as_one(compared: Compared) -> None:
    assert compared.cell("ddp", 2)["largest_loss_difference"] < 1e-12


def test_each_cell_has_its_parts(compared: Compared) -> None:
    for cell in (compared.cell("single", 1), compared.cell("ddp", 2)):
        assert cell["compute_ms"] > 0
        assert min(cell["data_wait_ms"], cell["rest_ms"]) >= 0
        assert len(cell["ranks_ms"]) == len(cell["peak_memory_mb"]) == cell["workers"]
    assert compared.cell("single", 1)["exposed_communication_ms"] is None
    assert compared.cell("ddp", 2)["exposed_communication_ms"] > 0


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
    assert children["ddp, 2 workers"].data.metrics["speedup"] == pytest.approx(compared.cell("ddp", 2)["speedup"])
    assert parent.data.tags["role"] == "benchmark"
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files >= {"speedup.json", "speedup_table.json", "speedup.png", "report.html", "experiment.yaml", "log.txt"}
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
    cells = {cell["title"]: cell for cell in json.loads(ended.stdout)["cells"]}

    assert ended.code == 1
    assert cells["1 worker"]["measured"]
    assert cells["ddp, 2 workers"]["reason"].startswith("it failed: rank 1 on ")
    assert "ZeroDivisionError: the model's own mistake" in ended.stderr


def test_a_batch_without_memory_is_a_row_with_the_reason(command: Any) -> None:
    """The file's batch of 8 per worker does not fit on the second rank."""
    ddp = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "train.epochs=9"]
    hungry = ["model={_target_: lab.Hungry, limit: 3, rank: 1}"]
    ended = command("benchmark", "lab.yaml", *ddp, *hungry, "--batch-sizes", "4,2", "--repeats", "2", "--json")
    assert ended.code == 0, ended.output
    document = json.loads(ended.stdout)
    cells = {cell["title"]: cell for cell in document["cells"]}
    for title in ("ddp, 2 workers", "ddp, 2 workers (batch 4)"):
        assert cells[title]["reason"] == "it does not fit into memory"
    assert len(cells["ddp, 2 workers (batch 2)"]["slots"]) == 2
    (advice,) = [one for one in document["advice"] if one["key"] == "train.gradient_accumulation"]
    assert advice["overrides"] == "train.gradient_accumulation=4"


def test_ctrl_c_keeps_and_reports_the_finished_cells(start: Any, tmp_path: Path) -> None:
    lasting = ["train.epochs=20", "benchmark.steps=200", "parallel.launcher=torchrun"]  # a cell is not over at once
    process = start("benchmark", MLP, *lasting, "--repeats", "50", "--json", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(_opened(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    cells = {cell["title"]: cell for cell in json.loads(stdout)["cells"]}

    assert process.returncode == 130, stderr
    assert cells["1 worker"]["measured"]
    assert cells["ddp, 2 workers"]["reason"] == "the benchmark ended before it was measured"
    (folder,) = (tmp_path / "runs").iterdir()
    *_, last = journal.read(folder / journal.FILE_NAME)
    assert isinstance(last, RunClosed)
    assert last.status == "KILLED"


def _opened(cwd: Path) -> list[TrialOpened]:
    journals = [folder / journal.FILE_NAME for folder in (cwd / "runs").glob("*")]
    return [e for path in journals if path.exists() for e in journal.read(path) if isinstance(e, TrialOpened)]
