"""Trackers of ``tracking.loggers``: what they write, that a resumed run doubles nothing, and what is refused."""

# promise: `tracking.loggers`: TensorBoard has each point once, also of a resumed run; `sync` sends what is missing

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.drive import preflight
from pipeline.errors import ExperimentError
from pipeline.experiment.load import load
from pipeline.protocol.events import AnyEvent, Evaluated, Metrics, Point, RunClosed, RunOpened, SystemMetrics
from pipeline.tracking import loggers

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"


def opened(**more: Any) -> RunOpened:
    given: dict[str, Any] = {
        "time": 1e9, "run": "made", "tracking_uri": "", "tracking_experiment": "lab", "tags": {"team": "vision"},
        "params": {"optimizer.lr": "0.1", "model._target_": "lab.Net"}, "trials": ("main", "baseline"),
        "directions": {"validation/loss": "min"},
    }  # fmt: skip
    return RunOpened(**given | more)


def metrics(
    steps: Sequence[int], *, time: float = 1e9, trial: str = "main", repeat: int = 0, **values: float
) -> Metrics:
    points = tuple(
        Point(name.replace("_", "/"), step, value + step) for name, value in values.items() for step in steps
    )
    return Metrics(time=time, trial=trial, repeat=repeat, step=steps[-1], epoch=1, points=points)


A_RUN: list[AnyEvent] = [
    opened(),
    metrics([1, 2], train_loss=0.5),
    metrics([1], trial="baseline", train_loss=1.5),
    metrics([1], trial="baseline", repeat=1, train_loss=7.0),  # of the same steps again
    SystemMetrics(time=1e9, node="n", points=(Point("system/cpu_utilization_percentage", 0, 50.0),)),
    metrics([3], train_loss=math.nan),
    metrics([3], validation_loss=0.25),
    Evaluated(
        time=1e9, trial="evaluation", split="test", samples=9, step=2, epoch=1, checkpoint="", values={"test/loss": 4.0}
    ),
    RunClosed(time=1e9 + 9, status="FINISHED", summary="**1.7x** of single"),
]


def written(name: str, folder: Path, events: Sequence[AnyEvent] = A_RUN) -> None:
    """Write a run as the process beside training does."""
    tracker = loggers.build(name, folder)
    for event in events:
        tracker.receive(event)
    tracker.close()


def test_a_package_that_is_missing_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ExperimentError) as caught:
        preflight.check(load(MLP, ["tracking.loggers=[wandb, tensorboard]"]))
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("tracking.loggers[0]", "this logger needs wandb, which is not installed: pip install wandb"),
        (
            "tracking.loggers[1]",
            "this logger needs tensorboard, which is not installed: pip install tensorboard",
        ),
    ]
    with pytest.raises(ExperimentError, match="tensorboard"):
        load(MLP, ["tracking.loggers=[tensorbord]"])


class TestTensorBoard:
    """Read back with TensorBoard's own reader."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("tensorboard")

    @staticmethod
    def read(folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
        read.Reload()
        return read

    def test_it_has_each_point_with_step_and_time(self, tmp_path: Path) -> None:
        written("tensorboard", tmp_path)
        main, baseline = (self.read(tmp_path / "tensorboard" / name) for name in ("main", "baseline"))
        losses = [(point.step, point.wall_time, point.value) for point in main.Scalars("train/loss")]
        assert losses[:2] == [(1, 1e9, 1.5), (2, 1e9, 2.5)]
        assert math.isnan(losses[2][2])
        assert {name: len(main.Scalars(name)) for name in main.Tags()["scalars"]} == {
            "train/loss": 3,
            "validation/loss": 1,
            "test/loss": 1,
            "system/cpu_utilization_percentage": 1,
        }
        assert [point.value for point in baseline.Scalars("train/loss")] == [2.5]

    def test_a_resumed_run_has_each_point_once(self, tmp_path: Path) -> None:
        written("tensorboard", tmp_path, A_RUN[:3])
        written("tensorboard", tmp_path)
        main = self.read(tmp_path / "tensorboard" / "main")
        assert [point.step for point in main.Scalars("train/loss")] == [1, 2, 3]

    def test_it_has_hyperparameters_and_the_summary(self, tmp_path: Path) -> None:
        from tensorboard.plugins.hparams import metadata

        written("tensorboard", tmp_path)
        main = self.read(tmp_path / "tensorboard" / "main")
        given = main.summary_metadata
        start = metadata.parse_session_start_info_plugin_data(
            given[metadata.SESSION_START_INFO_TAG].plugin_data.content
        )
        assert start.hparams["optimizer.lr"].number_value == 0.1
        assert start.hparams["model._target_"].string_value == "lab.Net"
        config = metadata.parse_experiment_plugin_data(given[metadata.EXPERIMENT_TAG].plugin_data.content)
        assert [metric.name.tag for metric in config.metric_infos] == ["validation/loss"]
        assert metadata.SESSION_END_INFO_TAG in given
        assert main.Tensors("summary/text_summary")[0].tensor_proto.string_val[0] == b"**1.7x** of single"
        assert list(loggers.places(tmp_path)) == [f"tensorboard --logdir {tmp_path / 'tensorboard'}"]
