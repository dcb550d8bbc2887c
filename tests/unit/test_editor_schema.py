"""What editors know of experiment files: whether the schema says what loading says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline import data, models, tasks
from pipeline.errors import ExperimentError
from pipeline.experiment import targets
from pipeline.experiment.load import load
from pipeline.experiment.problems import SUGGESTED, experiment_json_schema
from pipeline.experiment.targets import BUILT_IN
from pipeline.tasks import Task

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
# Editors know draft 7 (yaml-language-server does no other), our file says 2020-12: both must come to the same.
VALIDATORS = [jsonschema.Draft202012Validator, jsonschema.Draft7Validator]


def test_the_command_prints_the_schema(command: Callable[..., Any]) -> None:
    assert json.loads(command("schema").stdout) == experiment_json_schema()


@pytest.mark.parametrize("validator", VALIDATORS)
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_editor_marks_nothing_in_our_experiments(path: Path, validator: Any) -> None:
    assert list(validator(experiment_json_schema()).iter_errors(yaml.safe_load(path.read_text()))) == []


def _set(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(experiment: Any) -> None:
        for part in path[:-1]:
            experiment = experiment[part]
        experiment[path[-1]] = to

    return change


BAD = {
    "unknown section": _set("trian", to={}),
    "unknown key": _set("train", "batchsize", to=128),
    "text for a number": _set("train", "epochs", to="five"),
    "nothing to do": _set("train", "epochs", to=0),
    "unknown precision": _set("train", "precision", to="fp8"),
    "unknown strategy": _set("parallel", "strategy", to="dpp"),
    "unknown launcher": _set("parallel", "launcher", to="slurm"),
    "no workers": _set("parallel", "workers", to=0),
    "three numbers of workers": _set("parallel", "workers", to=[1, 2, 3]),
    "no baseline": _set("benchmark", to={"baseline": []}),
    "unknown strategy of the baseline": _set("benchmark", to={"baseline": {"strategy": "none"}}),
    "no dotted name": _set("model", "_target_", to="MLP"),
    "name with a space": _set("name", to="my experiment"),
    "negative seed": _set("seed", to=-1),
    "metric of training": _set("checkpoint", to={"best": "train/loss"}),
}


@pytest.mark.parametrize("validator", VALIDATORS)
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_an_editor_marks_what_loading_refuses(change: Callable[[Any], None], validator: Any, tmp_path: Path) -> None:
    experiment = yaml.safe_load((ROOT / "experiments" / "mlp.yaml").read_text())
    change(experiment)
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(experiment))

    assert not validator(experiment_json_schema()).is_valid(experiment)
    with pytest.raises(ExperimentError):
        load(file)


def test_no_generated_titles_stand_in_the_way() -> None:
    """They would be all that a small window shows."""
    schema = experiment_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert [name for s in sections for name, key in s["properties"].items() if "title" in key] == []


def test_suggested_components_exist_and_hold_all_that_is_built_in() -> None:
    for section, names in SUGGESTED.items():
        assert all(callable(targets.find(name, key=section, allowed=BUILT_IN)) for name in names)
    assert set(SUGGESTED["model"]) == {f"pipeline.models.{name}" for name in models.__all__}
    helpers = {"Splits", "example_sentences", "make_once", "read_csv", "draw_weighted"}
    offered = {*SUGGESTED["data"], *SUGGESTED["sampler"]}
    assert offered == {f"pipeline.data.{name}" for name in {*data.__all__} - helpers}
    built_in = {name for name, found in vars(tasks).items() if isinstance(found, type) and Task in found.__mro__[1:]}
    assert set(SUGGESTED["task"]) == {f"pipeline.tasks.{one}" for one in (*built_in, "Lightning")}


def test_an_editor_can_offer_components_where_they_belong() -> None:
    properties = experiment_json_schema()["properties"]
    offered = {
        "optimizer": properties["optimizer"]["anyOf"][0]["properties"],
        "optimizers": properties["optimizers"]["additionalProperties"]["properties"],
        "scheduler": properties["scheduler"]["anyOf"][0]["properties"],
        "metrics": properties["metrics"]["additionalProperties"]["properties"],
    }
    for section, inner in offered.items():
        assert inner["_target_"]["examples"] == list(SUGGESTED[section])
