"""`pipeline predict` as users call it."""

import json
import signal
import time
from pathlib import Path

import pytest

from pipeline.speedup.forecast import Forecast

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
    shown = ended.stdout.partition("lab: predicted")[2].partition("run      ")[0]
    assert max(map(len, shown.splitlines())) <= 80
    (folder,) = (tmp_path / "runs").glob("*-predict-*")
    saved = Forecast.model_validate_json((folder / "prediction.json").read_text())
    assert [prediction.workers for prediction in saved.outlooks[0].predictions] == [1, 2, 4, 8, 12]
    assert saved.check is None
    assert not (tmp_path / "mlflow.db").exists()  # a prediction isn't tracked
    again = command("show", str(folder))
    assert ended.stdout.endswith(again.stdout.partition("run      ")[0] + f"run      {folder}\n")
    assert Forecast.model_validate_json(command("show", str(folder), "--json").stdout) == saved


def test_json_is_all_of_stdout_and_strong_scaling_ends_with_the_batch(command):
    ended = command("predict", LAB, *LINK, "--json", "--scaling", "strong")
    assert ended.code == 0, ended.output
    found = Forecast.model_validate(json.loads(ended.stdout))
    (outlook,) = found.outlooks
    assert [prediction.workers for prediction in outlook.predictions] == [1, 2, 4, 8, 16]  # lab.yaml's batch is 16
    assert outlook.predictions[0].speedup == 1
    assert "first step" in ended.stderr


@pytest.mark.slow
def test_the_link_is_measured_and_the_prediction_checked(command):
    ended = command(
        "predict", LAB, "parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2", "--json"
    )
    assert ended.code == 0, ended.output
    found = Forecast.model_validate(json.loads(ended.stdout))
    assert found.link_from == "measured"
    assert found.measured_workers == 2
    assert found.link.latency_us > 0
    assert found.link.bandwidth_gbit > 0
    assert found.check is not None
    assert found.check.workers == 2
    assert found.check.measured > 0
    assert found.outlooks[0].predictions[1].speedup == pytest.approx(found.check.predicted)
    assert found.outlooks[0].worthwhile == 1  # a step of a tenth of a millisecond isn't worth sharing


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--link", "fast"], 2, "'fast' is not understood"),
        (["--link", "10Gbit"], 2, "10Gbit,50us"),
        ([*LINK, "--workers", "0"], 2, "--workers"),
        ([*LINK, "--workers", "5000"], 2, "--workers"),
        ([*LINK, "--workers", "many"], 2, "--workers"),
        ([*LINK, "--scaling", "sideways"], 2, "--scaling"),
        ([], 3, "give the link, e.g. --link 10Gbit,50us"),
        (["parallel.launcher=torchrun", "parallel.cpus_per_worker=100"], 3, "two workers don't fit"),
        (["parallel.strategy=ddp", "parallel.options.communication_hook=powersgd", *LINK], 2, "communication_hook"),
        (["data.samples=10", *LINK], 2, "10 samples, fewer than the global batch of 16"),
    ],
)
def test_what_cannot_be_predicted(command, arguments, code, message):
    ended = command("predict", LAB, *arguments)
    assert ended.code == code, ended.output
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert "Traceback" not in ended.output


def test_not_under_torchrun(command, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv("RANK", "0")
    ended = command("predict", LAB, *LINK)
    assert ended.code == 2
    assert "without torchrun" in ended.stderr


def test_interrupted(start, project, tmp_path):
    process = start("predict", project / LAB, *LINK, f"tracking.directory={tmp_path}", "train.epochs=1000000",
                    "measure.steps=1000000", cwd=project)  # fmt: skip
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
