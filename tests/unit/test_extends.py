"""Experiment files that extend others: what is merged, where its problems are, and what else must cope with it."""

# promise: an experiment that extends another is what one file would be

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipeline.errors import ExperimentError
from pipeline.experiment.load import ExperimentFile, config_hash, flatten, from_mapping, load, to_yaml
from pipeline.experiment.problems import experiment_json_schema

BASE = """\
name: base
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data: {_target_: torch.nn.Identity}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer:
  _target_: torch.optim.SGD
  lr: 0.1
  momentum: 0.9
scheduler: {_target_: torch.nn.Flatten}
train:
  epochs: 2
  global_batch_size: ${oc.decode:${oc.env:SIZE,16}}
  lr_scaling: {rule: linear}
benchmark:
  baseline: {strategy: ddp, workers: 2}
sweep:
  parameters:
    optimizer.lr: {grid: [0.1, 0.2]}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lab").mkdir()
    Path("lab/base.yaml").write_text(BASE)


def read(text: str, *overrides: str) -> ExperimentFile:
    Path("lab/e.yaml").write_text(text)
    return load("lab/e.yaml", overrides)


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        read(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_sections_are_merged_lists_and_components_are_replaced() -> None:
    file = read(
        "extends: base.yaml\nname: e\nmodel: {out_features: 3}\noptimizer: {_target_: torch.optim.AdamW, lr: 1e-3}\n"
        "scheduler: null\ntrain: {epochs: 5}\nbenchmark: {baseline: {strategy: dp}}\n"
        "sweep: {parameters: {optimizer.lr: {choice: [1, 2]}}, trials: 2}\n"
    )
    experiment = file.experiment
    assert (experiment.name, experiment.scheduler) == ("e", None)
    assert experiment.model.arguments == {"in_features": 4, "out_features": 3}
    assert experiment.optimizer.arguments == {"lr": 1e-3}
    assert (experiment.train.epochs, experiment.train.global_batch_size) == (5, 16)
    assert experiment.train.lr_scaling.rule == "linear"
    assert experiment.benchmark.baseline.strategy == "dp"
    assert experiment.sweep is not None
    assert experiment.sweep.parameters["optimizer.lr"].choice == (1, 2)
    assert file.bases == (Path("lab/base.yaml"),)
    changed = read("extends: base.yaml\noptimizer: {lr: 1.0}").experiment.optimizer  # without a target
    assert changed.arguments == {"lr": 1.0, "momentum": 0.9}


def test_it_is_the_experiment_that_one_file_would_be() -> None:
    file = read("extends: base.yaml\nname: e\ntrain: {epochs: 5}", "seed=3")
    Path("whole.yaml").write_text(BASE.replace("name: base", "name: e").replace("epochs: 2", "epochs: 5"))
    whole = load("whole.yaml", ["seed=3"])

    assert file.experiment == whole.experiment
    assert config_hash(file.experiment) == config_hash(whole.experiment)
    assert to_yaml(file.experiment) == to_yaml(whole.experiment)
    assert "extends" not in flatten(file.experiment)
    assert file.vary({"optimizer.lr": 0.2}).experiment == whole.vary({"optimizer.lr": 0.2}).experiment


def test_a_chain_is_relative_to_each_file(tmp_path: Path) -> None:
    Path("lab/more").mkdir()
    Path("lab/more/middle.yaml").write_text("extends: ../base.yaml\nseed: 4\ntrain: {epochs: 3}\n")
    file = read("extends: more/middle.yaml\nseed: 5")

    assert (file.experiment.seed, file.experiment.train.epochs) == (5, 3)
    assert [path.resolve() for path in file.bases] == [tmp_path / "lab/more/middle.yaml", tmp_path / "lab/base.yaml"]
    assert file.places.locate("optimizer.lr") == "lab/more/../base.yaml:7"


def test_a_problem_has_the_file_and_line_that_it_comes_from() -> None:
    Path("lab/base.yaml").write_text(BASE.replace("epochs: 2", "epochs: two").replace("momentum", "momentum: 1\n  lr2"))
    text = "extends: base.yaml\ntrain:\n  precision: fp8\nbenchmark:\n  step: 3\n  baseline: {strategy: nope}\n"

    shown = problems_of(text, "seed=-1")
    assert [problem.split(": is ")[0].split(": unknown")[0] for problem in shown] == [
        "lab/e.yaml:3: train.precision", "lab/e.yaml:5: benchmark.step", "lab/e.yaml:6: benchmark.baseline.strategy",
        "lab/base.yaml:12: train.epochs", "command line: seed=-1: seed",
    ]  # fmt: skip
    Path("lab/base.yaml").write_text(BASE.replace("name: base\n", ""))
    (problem,) = problems_of("extends: base.yaml\n")
    assert problem.startswith("lab/e.yaml: name: missing")


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("3", "lab/e.yaml:2: extends: is 3 (an integer); write the path of a file, relative to this one"),
        ("[base.yaml]", "lab/e.yaml:2: extends: is a list; write the path"),
        ('"${oc.env:BASE}"', "lab/e.yaml:2: extends: is '${oc.env:BASE}' (a string); write the path"),
        ("bose.yaml", "lab/e.yaml:2: extends: is bose.yaml; lab/bose.yaml: there is no such file; did you mean"),
        (".", "lab/e.yaml:2: extends: is .; lab is a folder, not an experiment file; there are"),
        ("e.yaml",
         "lab/e.yaml:2: extends: the files extend each other: lab/e.yaml extends lab/e.yaml. Remove one of them."),
        ("ring.yaml", "lab/ring.yaml:1: extends: the files extend each other: lab/e.yaml extends lab/ring.yaml"),
        ("damaged.yaml", "lab/damaged.yaml:3: can't be read as YAML: while parsing a flow node"),
        ("text.yaml", "lab/text.yaml: is 'text' (a string); write sections"),
    ],
)  # fmt: skip
def test_what_cannot_be_extended_is_refused(extends: str, message: str) -> None:
    Path("lab/ring.yaml").write_text("extends: ../lab/e.yaml\n")
    Path("lab/damaged.yaml").write_text("name: x\nmodel: {\n")
    Path("lab/text.yaml").write_text("text\n")
    (problem,) = problems_of(f"name: e\nextends: {extends}\n")
    assert problem.startswith(message)
    expected = "command line: extends=x.yaml: extends: works only in files. Set it in the experiment file."
    assert problems_of("extends: base.yaml\n", "extends=x.yaml") == [expected]


def test_a_dict_extends_a_file_of_the_working_directory() -> None:
    file = from_mapping({"extends": "lab/base.yaml", "name": "e"})
    assert (file.experiment.name, file.experiment.train.epochs) == ("e", 2)
    with pytest.raises(ExperimentError, match=r"experiment: extends: is base\.yaml; base\.yaml: there is no such file"):
        from_mapping({"extends": "base.yaml"})


@pytest.mark.parametrize("text", ["extends: base.yaml\ntrain: {epochs: 3}\noptimizer: {lr: 1.0}", "extends: base.yaml"])
def test_an_editor_marks_wrong_values_and_leaves_what_is_missing_to_check(text: str) -> None:
    validator = Draft202012Validator(experiment_json_schema())
    assert validator.is_valid(yaml.safe_load(text))
    assert not validator.is_valid({"extends": "base.yaml", "train": {"epochs": "three"}})
