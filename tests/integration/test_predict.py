"""`pipeline predict` as users call it."""

import json
import signal
import time
from pathlib import Path

from mlflow import MlflowClient

from pipeline.report.forecast import Forecast

LAB = "lab.yaml"
LINK = ["--link", "10Gbit,50us"]


def test_a_given_link_needs_one_worker(command, tmp_path):
    where = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", f"tracking.directory={tmp_path}/runs"]
    ended = command("predict", LAB, *where, *LINK, "--workers", "12")
    assert ended.code == 0, ended.output
    assert "link       10 Gbit/s, 50 us, as given" in ended.stdout
    assert "Strong scaling" in ended.stdout
    assert "Weak scaling" in ended.stdout
    assert "Not checked" in ended.stdout
    shown = ended.stdout.partition("lab: predicted")[2].partition("Strong scaling")[0]  # tables are as wide as they are
    assert max(map(len, shown.splitlines())) <= 80
    (folder,) = (tmp_path / "runs").glob("*-predict-*")
    saved = Forecast.model_validate_json((folder / "prediction.json").read_text())
    assert [prediction.workers for prediction in saved.outlooks[0].predictions] == [1, 2, 4, 8, 12]
    assert saved.check is None
    again = command("show", str(folder))
    assert again.stdout in ended.stdout  # on a busy machine a line on what MLflow lacks follows
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (main,) = client.search_runs(["1"], filter_string="tags.role = 'predict'")
    assert "prediction.json" in {one.path for one in client.list_artifacts(main.info.run_id)}
    assert "| workers |" in main.data.tags["mlflow.note.content"]
    assert Forecast.model_validate_json(command("show", str(folder), "--json").stdout) == saved


def test_json_is_all_of_stdout_and_strong_scaling_ends_with_the_batch(command):
    ended = command("predict", LAB, *LINK, "--json", "--scaling", "strong")
    assert ended.code == 0, ended.output
    found = Forecast.model_validate(json.loads(ended.stdout))
    (outlook,) = found.outlooks
    assert [prediction.workers for prediction in outlook.predictions] == [1, 2, 4, 8, 16]  # lab.yaml's batch is 16
    assert outlook.predictions[0].speedup == 1
    assert "first step" in ended.stderr


def test_interrupted(start, project, tmp_path):
    process = start("predict", project / LAB, *LINK, f"tracking.directory={tmp_path}", "train.epochs=1000000",
                    "benchmark.steps=1000000", cwd=project)  # fmt: skip
    deadline = time.monotonic() + 60
    while "started" not in _journal(tmp_path):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


def _journal(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*/events.jsonl"))
