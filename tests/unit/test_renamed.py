"""Keys of earlier versions: rejected in a user's file, rewritten by ``check --fix``, translated in a recorded run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config.load import load
from pipeline.config.renamed import translate_key, translate_params
from pipeline.config.rewrite import rewrite
from pipeline.errors import ExperimentError

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
OLD = """\
# an experiment of before
name: old  # its name
compare: # the first is the baseline
  - strategy: single   # alone
  # more of them
  - {strategy: ddp, workers: 2}
  - strategy: ddp
    options: {bucket_cap_mb: 1}

# how it is measured
measure:  # briefly
  budget_s: 10 # seconds

  pairs: 8
order: # evenly
  weights: balanced
parallel: {interface: eth0, strategy: ddp}
tracking:
  also: [tensorboard]
  trackers:
    - _target_: mine.Tracker   # mine
      file: a.csv
sweep:
  parameters:
    order.weights: {grid: [balanced]}
"""
NEW = """\
# an experiment of before
name: old  # its name
benchmark: # the first is the baseline
  baseline:
    strategy: single   # alone
  configurations:
    # more of them
    - {strategy: ddp, workers: 2}
    - strategy: ddp
      options: {bucket_cap_mb: 1}
  # briefly
  time_budget_s: 10 # seconds

  rounds: 8

# how it is measured
sampler: # evenly
  weights: balanced
parallel: {network_interface: eth0, strategy: ddp}
tracking:
  loggers: [tensorboard, {_target_: mine.Tracker, file: a.csv}]
sweep:
  parameters:
    sampler.weights: {grid: [balanced]}
"""


def test_a_file_is_rewritten_with_its_comments() -> None:
    assert rewrite(OLD, name="e.yaml") == NEW
    assert rewrite(NEW, name="e.yaml") == NEW


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "compare: [{strategy: single}, {strategy: dp}]  # two\nmeasure: {interval: 0.9, steps: 3}\n",
            "benchmark:\n  baseline: {strategy: single}  # two\n  configurations: [{strategy: dp}]\n"
            "  confidence_level: 0.9\n  steps: 3\n",
        ),
        ("measure:\n    pairs: 9\n\nseed: 1\n", "benchmark:\n  rounds: 9\n\nseed: 1\n"),
        ("compare:\n- {strategy: ddp}  # b\n", "benchmark:\n  baseline: {strategy: ddp}  # b\n"),
        ("tracking: {trackers: [{_target_: a.B}]}\n", "tracking: {loggers: [{_target_: a.B}]}\n"),
    ],
)
def test_other_layouts_are_rewritten(old: str, new: str) -> None:
    assert rewrite(old, name="e.yaml") == new


def test_a_layout_that_cannot_be_kept_is_left_to_the_user() -> None:
    with pytest.raises(ExperimentError, match=r"Rename the keys by hand: compare is now benchmark"):
        rewrite("compare: &all\n  - {strategy: single}\nseed: [*all]\n", name="e.yaml")


def test_check_names_old_keys_and_fixes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, file = Path("base.yaml"), Path("e.yaml")
    base.write_text(MLP.read_text() + "order: {weights: balanced}\n")
    file.write_text("extends: base.yaml\ncompare: [{strategy: dp}]\n")
    with pytest.raises(ExperimentError) as caught:
        load(file, ["measure.pairs=8"])
    assert str(caught.value).splitlines() == [
        "e.yaml:2: compare: is called benchmark now. To rewrite the file, use: pipeline check --fix FILE",
        f"base.yaml:{len(base.read_text().splitlines())}: order: is called sampler now. "
        "To rewrite the file, use: pipeline check --fix FILE",
        "command line: measure.pairs=8: measure.pairs: is called benchmark.rounds now",
    ]

    from pipeline.commands.check import fix_file

    differences = "\n".join(fix_file(file))
    assert "-compare: [{strategy: dp}]" in differences
    assert "+sampler: {weights: balanced}" in differences
    experiment = load(file).experiment
    assert (experiment.benchmark.baseline.strategy, experiment.sampler is None) == ("dp", False)
    assert not list(fix_file(file))


def test_fix_is_an_option_of_check() -> None:
    assert "--fix" in CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "200"}).stdout


def test_a_recorded_run_is_read_with_the_new_names(tmp_path: Path) -> None:
    recorded: dict[str, Any] = yaml.safe_load(MLP.read_text())
    del recorded["benchmark"]
    recorded |= {
        "compare": [{"strategy": "single"}, {"strategy": "dp"}],
        "measure": {"pairs": 9, "budget_s": 3, "interval": 0.9},
        "order": {"weights": "balanced"},
        "tracking": {"also": ["tensorboard"], "trackers": []},
        "sweep": {"parameters": {"order.weights": {"grid": ["balanced"]}}},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(recorded))
    (tmp_path / "events.jsonl").touch()

    experiment = load(tmp_path / "experiment.yaml").experiment

    benchmark = experiment.benchmark
    assert [entry.strategy for entry in benchmark.entries.values()] == ["single", "dp"]
    assert (benchmark.rounds, benchmark.time_budget_s, benchmark.confidence_level) == (9, 3, 0.9)
    assert experiment.sampler is not None
    assert experiment.tracking.named_loggers == ("tensorboard",)
    assert experiment.sweep is not None
    assert list(experiment.sweep.parameters) == ["sampler.weights"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("compare[0].strategy", "benchmark.baseline.strategy"),
        ("compare[2].options.x", "benchmark.configurations[1].options.x"),
        ("measure.steps", "benchmark.steps"),
        ("order._target_", "sampler._target_"),
        ("ordered", "ordered"),
        ("data.order", "data.order"),
        ("measure.pairs", "benchmark.rounds"),
        ("parallel.interface", "parallel.network_interface"),
    ],
)
def test_keys(old: str, new: str) -> None:
    assert translate_key(old) == new
    assert translate_params({old: "x"}) == {new: "x"}
