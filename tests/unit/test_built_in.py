"""Built-in packages: names that run code are rejected, before anything is built."""

# promise: of libraries, an experiment file names no module that is known to run or fetch code
# promise: a script without a guard is named

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.drive import preflight
from pipeline.errors import ExperimentError
from pipeline.experiment import targets
from pipeline.experiment.components import resolve
from pipeline.experiment.load import from_mapping
from pipeline.experiment.targets import BUILT_IN
from pipeline.experiment.values import Component


def rejections(target: str, *own: str, **arguments: Any) -> dict[str, str]:
    component = Component.model_validate({"_target_": target, **arguments})
    try:
        resolve(component, key="model", allowed=(*BUILT_IN, *own))
    except ExperimentError as error:
        return {problem.key: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    "target",
    [
        "torch.utils.data.datapipes.gen_pyi.gen_from_template",
        "torch.utils.data.datapipes.iter.RoutedDecoder",
        "torch.utils.data.IterDataPipe",
        "torchmetrics.multimodal.CLIPScore",
        "torchmetrics.text.BERTScore",
    ],
)
def test_the_reason_and_the_remedy(target: str) -> None:
    message = rejections(target)["model._target_"]
    assert message.startswith(f"{target} can load and run code. To use it, call {target} in a function of your package")
    assert 'packages = ["myproject"] below [tool.pipeline]' in message


def test_the_list_stays_short() -> None:
    assert len(targets._RUN_CODE) <= 20


class TestNothingIsBuilt:
    """No component is called before all names are allowed: the metric would leave a file."""

    FILE = """
from torchmetrics import MeanMetric
class Leaving(MeanMetric):
    def __init__(self):
        super().__init__()
        open("built", "w").close()
"""

    @pytest.fixture(autouse=True)
    def _project(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "leaving_metric", raising=False)
        Path("leaving_metric.py").write_text(self.FILE)
        Path("pyproject.toml").write_text('[tool.pipeline]\npackages = ["leaving_metric"]\n')

    def keys(self, overrides: list[str], **sections: Any) -> list[str]:
        file = {
            "name": "e",
            "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2},
            "data": {"_target_": "pipeline.data.digits"},
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
            "metrics": {"leaving": {"_target_": "leaving_metric.Leaving"}},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "train": {"epochs": 1, "global_batch_size": 1},
        }
        with pytest.raises(ExperimentError) as caught:
            preflight.check(from_mapping(file | sections, overrides), with_data=True)
        return [problem.key for problem in caught.value.problems]

    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            (["data._target_=torch.utils.data.datapipes.gen_pyi.gen_from_template"], "data._target_"),
            (["model.in_features={_target_: os.system, command: x}"], "model.in_features._target_"),
        ],
    )
    def test_by_an_override(self, overrides: list[str], key: str) -> None:
        assert key in self.keys([each.removeprefix("+") for each in overrides])
        assert not Path("built").exists()

    def test_by_a_value_of_a_sweep(self) -> None:
        values = ["torch.optim.SGD", "torch.load"]
        sweep = {"parameters": {"optimizer._target_": {"grid": values}}}
        assert self.keys([], sweep=sweep) == ["sweep.parameters.optimizer._target_"]
        assert not Path("built").exists()
