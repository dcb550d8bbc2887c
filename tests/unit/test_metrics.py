"""Metrics: which values are good, names, what is refused before training, what they compute, those of training steps.

What is refused after the first step: test_training_errors.py.
"""

# promise: metrics of training steps are those of all samples since the last report, on all ranks

import csv
import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import run
from torchmetrics import classification
from typer.testing import CliRunner

from pipeline import cli
from pipeline.commands import run as runner
from pipeline.commands import sweep as sweeps
from pipeline.drive import preflight
from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment import reported
from pipeline.experiment.load import ExperimentFile, load
from pipeline.protocol.events import ArtifactSaved
from pipeline.record.screen import Terminal
from pipeline.train import meter
from pipeline.train import metrics as metrics_of
from pipeline.train.hooks import TrainedMetrics
from pipeline.train.kept import compute_gradients
from pipeline.train.storage import Storage, entries, verify

MSE = "mse: {_target_: torchmetrics.MeanSquaredError}"
FILE = """\
name: chosen
model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
data: {_target_: toys.regression}
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.05}
train: {epochs: 4, global_batch_size: 8}
parallel: {launcher: inprocess, strategy: single, workers: 1}
tracking: {uri: "sqlite:///mlflow.db"}
"""


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExperimentFile]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["toys", "toy_metrics"]\n')

    def read(text: str = "", *overrides: str) -> ExperimentFile:
        (tmp_path / "e.yaml").write_text(FILE + text)
        return load("e.yaml", overrides)

    return read


def refused(look: Callable[[], object]) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        look()
    return [str(problem) for problem in caught.value.problems]


class TestWhichValuesAreGood:
    @pytest.mark.parametrize(
        ("metric", "text", "expected"),
        [
            ("validation/mse", MSE, "min"),
            ("validation/loss", MSE, "min"),
            ("validation/error", "error: {_target_: torchmetrics.R2Score}", "max"),
            ("validation/mine", "mine: {_target_: toy_metrics.Count}", None),
        ],
    )
    def test_torchmetrics_decides(self, read: Any, metric: str, text: str, expected: str | None) -> None:
        sweep = f"metrics: {{{text}}}\nsweep: {{metric: {metric}, parameters: {{optimizer.lr: {{grid: [0.1]}}}}}}\n"
        if expected is None:
            (told,) = refused(lambda: preflight.check(read(sweep)))
            assert told.startswith("e.yaml:10: sweep.metric: Count does not declare whether higher validation/mine is")
            assert told.endswith("Set sweep.mode to max or min.")
        else:
            assert sweeps.make(read(sweep)).direction == expected


class TestNames:
    NAMES = "metrics:\n  'acc@1 (%)': {{_target_: toy_metrics.Count}}\n  '{}': {{_target_: toy_metrics.Count}}\n"

    def test_that_mlflow_makes_equal_are_refused(self, read: Any) -> None:
        assert refused(lambda: read(self.NAMES.format("acc_1 (%)"))) == [
            "e.yaml:11: metrics.acc_1 (%): has the same name in MLflow as metrics.acc@1 (%): "
            "validation/acc_1 ___. Rename one of them."
        ]
        read(self.NAMES.format("acc@5 (%)"))


class TestCheckedAhead:
    """By ``check``, ``--dry-run`` and ``run``: no folder is made for what they refuse."""

    def test_a_wrong_keyword_of_a_metric(self, read: Any, tmp_path: Path) -> None:
        file = read(f"metrics: {{{MSE.replace('Error', 'Error, num_clases: 3')}}}\n")
        said = "e.yaml:9: metrics.mse: torchmetrics.MeanSquaredError raised ValueError: Unexpected keyword arguments: "
        ended = CliRunner().invoke(cli.app, ["check", "e.yaml"])
        assert (ended.exit_code, said in ended.output) == (2, True)
        assert refused(lambda: runner.dry_run(file, with_baseline=False))[0].startswith(said)
        run = partial(runner.run, file, with_baseline=False, verbose=False, terminal=Terminal.of(quiet=True))
        assert refused(run)[0].startswith(said)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["e.yaml", "pyproject.toml"]

    def test_data_that_is_no_pair(self, read: Any) -> None:
        read()
        Path("e.yaml").write_text(FILE.replace("toys.regression", "toys.quadruple"))
        file = load("e.yaml", ())
        said = "e.yaml:3: data: toys.quadruple returned a tuple of 4. Return a tuple of a training"
        assert refused(lambda: preflight.check(file, with_data=True))[0].startswith(said)
        assert refused(lambda: runner.dry_run(file, with_baseline=False))[0].startswith(said)
        ended = [CliRunner().invoke(cli.app, ["check", *words, "e.yaml"]) for words in ([], ["--no-data"])]
        assert [one.exit_code for one in ended] == [2, 0]  # data may be elsewhere


class TestAValidationLossThatIsNotFinite:
    @staticmethod
    def sections(on_nonfinite: str) -> dict[str, Any]:
        return {
            "data": {"_target_": "toys.poisoned_validation"},
            "train": {"epochs": 3, "on_nonfinite": on_nonfinite},
            "checkpoint": {"every_steps": 2},
        }

    def test_ends_training_before_its_checkpoint(self, tmp_path: Path) -> None:
        outbox = toys.Kept()
        with pytest.raises(TrainingError, match=r"validation loss is nan after epoch 1 \(step 3\), although"):
            run(tmp_path, outbox=outbox, **self.sections("stop"))
        assert math.isnan(outbox.series("validation/loss")[-1])
        (entry,) = entries(Storage(str(tmp_path)))
        assert (entry.name, verify(Storage(str(tmp_path)), entry)) == ("step-00000002", None)

    def test_is_told_where_steps_may_be_skipped(self) -> None:
        result, outbox = toys.trained(**self.sections("skip"))
        assert result.steps == 9
        assert outbox.warnings == [
            f"the validation loss is nan after epoch {n} (step {3 * n}), although the weights are finite. Training "
            "continues because of train.on_nonfinite: skip."
            for n in (1, 2, 3)
        ]


CLASSES = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
    "data": {"_target_": "toys.classification"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}
OF = "torchmetrics.classification."


def metric(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{OF}{name}", "num_classes": 3, **arguments}


class TestWhatMetricsCompute:
    def test_curves_become_a_table_and_a_picture(self) -> None:
        metrics = {
            "roc": metric("MulticlassROC"),
            "pr@k": metric("MulticlassPrecisionRecallCurve", thresholds=5),
            "mean": metric("MulticlassROC", average="macro", thresholds=5),
            "accuracy": metric("MulticlassAccuracy"),
            "recall": metric("MulticlassRecallAtFixedPrecision", min_precision=0.3),
        }
        result, outbox = toys.trained(**CLASSES, metrics=metrics)
        assert set(result.metrics) >= {"validation/loss", "validation/accuracy"}
        assert not [name for name in result.metrics if "roc" in name or "pr@k" in name]
        # A point of a curve comes with its threshold.
        assert set(result.metrics) >= {f"validation/recall{part}_{i}" for part in ("", "_threshold") for i in range(3)}
        saved = [event.path for event in outbox.events if isinstance(event, ArtifactSaved)]
        assert sorted(path for path in saved if path.startswith("metrics/")) == [
            f"metrics/{name}.{kind}" for name in ("mean", "pr%40k", "roc") for kind in ("csv", "png")
        ]
        assert all(outbox.files[f"metrics/{name}.png"].startswith(b"\x89PNG") for name in ("roc", "pr%40k"))
        roc, recall, mean = (
            list(csv.DictReader(io.StringIO(outbox.files[f"metrics/{name}.csv"].decode())))
            for name in ("roc", "pr%40k", "mean")
        )
        assert list(roc[0]) == ["class", "false_positive_rate", "true_positive_rate", "threshold"]
        assert {row["class"] for row in roc} == {"0", "1", "2"}
        assert list(recall[0]) == ["class", "recall", "precision", "threshold"]
        assert [row["threshold"] for row in recall[:6]] == ["0.0", "0.25", "0.5", "0.75", "1.0", ""]
        assert {row["class"] for row in mean} == {""}

    def test_a_large_result_becomes_a_table_and_a_picture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.train.metrics._MOST_VALUES", 8)
        confusion, recall = metric("MulticlassConfusionMatrix"), metric("MulticlassRecall", average="none")
        result, outbox = toys.trained(**CLASSES, metrics={"confusion": confusion, "recall": recall})
        assert not [name for name in result.metrics if "confusion" in name]
        assert "validation/recall_2" in result.metrics
        assert outbox.files["metrics/confusion.png"].startswith(b"\x89PNG")
        rows = list(csv.DictReader(io.StringIO(outbox.files["metrics/confusion.csv"].decode())))
        assert [(row["true"], row["predicted"]) for row in rows] == [(a, b) for a in "012" for b in "012"]
        of_class = [sum(float(row["value"]) for row in rows if row["true"] == each) for each in "012"]
        own = [float(row["value"]) for row in rows if row["true"] == row["predicted"]]
        expected = [result.metrics[f"validation/recall_{each}"] for each in range(3)]
        assert [right / all_of for right, all_of in zip(own, of_class, strict=True)] == pytest.approx(expected)

    def test_an_entry_of_a_matrix_is_named_by_both_classes(self) -> None:
        metrics = {
            "table": classification.MulticlassConfusionMatrix(num_classes=3),
            "labels": classification.MultilabelConfusionMatrix(num_labels=2),
            "scores": classification.MulticlassStatScores(num_classes=3, average=None),
            "jaccard": classification.MulticlassJaccardIndex(num_classes=3, average=None),
        }
        results = {
            "table": torch.arange(9).reshape(3, 3), "labels": torch.arange(8).reshape(2, 2, 2),
            "scores": torch.arange(15).reshape(3, 5), "jaccard": torch.arange(3),
        }  # fmt: skip
        values = metrics_of.read(results, metrics).values
        assert values["table_true_0_predicted_1"] == 1.0
        assert values["table_true_2_predicted_0"] == 6.0
        assert values["labels_1_true_0_predicted_1"] == 5.0
        assert (values["scores_1_4"], values["jaccard_2"], len(values)) == (9.0, 2.0, 9 + 8 + 15 + 3)
        assert {reported.source_of(f"validation/{name}", metrics) for name in values} == set(metrics)
        assert reported.source_of("validation/table_0x", metrics) is None

    def test_trying_them_changes_nothing(self) -> None:
        plain, tried = (
            toys.trained(model={"_target_": "toys.Counting"}, metrics=metrics)[1].weights
            for metrics in ({}, {"n": {"_target_": "toy_metrics.Count"}})
        )
        assert all(torch.equal(plain[name], tried[name]) for name in plain)


# Of training steps

BOTH = ["train", "validation"]
COUNT = {"_target_": "toy_metrics.Count"}
ERROR = {"_target_": "torchmetrics.MeanSquaredError"}


@pytest.mark.parametrize("train", [{}, {"gradient_accumulation": 2}, {"evaluate_every_steps": 2}])
def test_each_sample_counts_once_between_two_reports(train: dict[str, Any]) -> None:
    _, kept = toys.trained(metrics={"count": {**COUNT, "on": BOTH}, "other": COUNT}, train=train)
    assert sum(kept.series("train/count")) == 2 * toys.SAMPLES
    assert set(kept.series("validation/count")) == {10}
    assert not kept.series("train/other")


def test_a_step_that_is_reported_alone_has_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "REPORT_MS", 0.0)
    _, kept = toys.trained(metrics={"error": {**ERROR, "on": BOTH}}, train={"gradient_accumulation": 2})
    assert kept.series("train/error") == pytest.approx(kept.series("train/loss"), rel=1e-6)
    assert len(kept.series("train/error")) == 6


def test_they_hold_no_graph_and_leave_out_passes_without_update() -> None:
    s = toys.built(metrics={"parts": {"_target_": "toy_metrics.Parts", "on": BOTH}})
    outputs = toys.hook(s, TrainedMetrics)._metrics["parts"].metric_state["outputs"]
    compute_gradients(s, s.batches.stream(0, last_step=1))
    assert outputs == []
    s.train_step(s, s.batches.stream(0, last_step=1), step=0)
    assert [len(each) for each in outputs] == [8]
    assert not outputs[0].requires_grad


def test_the_default_leaves_a_plain_step_and_the_hash_as_they_were() -> None:
    for on in ({"on": BOTH}, {}):
        written = toys.experiment(metrics={"count": {**COUNT, **on}}).model_dump(mode="json")["metrics"]
        assert written == {"count": {**COUNT, "on": BOTH if on else ["validation"]}}
    s = toys.built(metrics={"count": COUNT})
    assert not s.hooks
    assert not s.trainee.keeps_outputs
    assert torch.is_tensor(s.train_step(s, s.batches.stream(0, last_step=1), step=0).sums["loss"])
    assert not s.outputs
