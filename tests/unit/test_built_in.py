"""Built-in packages: every name that an experiment file can reach, and the arguments that it can't give."""

# promise: an experiment file names only kinds of classes and listed functions of libraries
# promise: a script without a guard, and files that hide a library, are named

import importlib
import inspect
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from reachable import loading_in, naming_in, reachable
from torch.optim.lr_scheduler import LRScheduler

import pipeline
from pipeline.commands.check import _check_here
from pipeline.config.built_in import find_rejected_arguments
from pipeline.config.components import resolve
from pipeline.config.hidden_libraries import check_libraries, explain_failed_import
from pipeline.config.load import from_mapping, load
from pipeline.config.targets import BUILT_IN
from pipeline.config.values import Component
from pipeline.driver import preflight
from pipeline.errors import ExperimentError, UsageError

PROJECT = Path(__file__).parents[1] / "project"
KINDS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
    torchmetrics.Metric,
)
OF_NO_KIND = {
    "pipeline.data.arrays.arrays",
    "pipeline.data.example_sentences.example_sentences",
    "pipeline.data.handwriting.digits",
    "pipeline.data.labelled_texts.texts",
    "pipeline.data.padding.padded",
    "pipeline.data.splits.Splits",
    "pipeline.data.tabular.tabular",
    "pipeline.data.text.characters",
    "pipeline.data.tokens.tokens",
    "pipeline.models.pretrained.pretrained",
    "pipeline.models.resnet.resnet18",
    "pipeline.models.resnet.resnet50",
    "pipeline.tasks.LanguageModel",
    "pipeline.tasks.Supervised",
    "pipeline.tasks.from_model.FromModel",
    "pipeline.tasks.lightning.Lightning",
    "pipeline.tasks.lightning.configured_optimizer",
    "pipeline.tasks.lightning.configured_scheduler",
    "pipeline.tasks.protocols.Task",
    "torch.nn.utils.parametrizations.orthogonal",
    "torch.nn.utils.parametrizations.spectral_norm",
    "torch.nn.utils.parametrizations.weight_norm",
    "torch.nn.utils.spectral_norm.spectral_norm",
    "torch.nn.utils.weight_norm.weight_norm",
    "torch.optim.swa_utils.get_ema_avg_fn",
    "torch.optim.swa_utils.get_ema_multi_avg_fn",
    "torch.utils.data._utils.collate.default_collate",
    "torch.utils.data.dataset.random_split",
}
READ = {
    "pipeline.models.pretrained.pretrained": {"from_pretrained"},  # trust_remote_code=False
    "torchmetrics.functional.image.dists.DISTSNetwork": {"load"},  # a file of torchmetrics
}
"""Constructors that load something, read and found to run no code."""
NAMED = {
    "feature_extractor_weights_path": {"FrechetInceptionDistance", "NoTrainInceptionV3"},  # can't be given
    "path": {"pretrained"},
    "pretrained": {"Alexnet", "SqueezeNet", "Vgg16"},
}
"""Arguments that sound like a file or an address, and who takes them."""


@pytest.fixture(scope="module")
def reached() -> dict[str, Callable[..., Any]]:
    """All that can be named without transformers, torchvision and timm."""
    packages = ("torch.nn", "torch.optim", "torch.utils.data", "torchmetrics")
    return reachable(*packages, "pipeline.models", "pipeline.data", "pipeline.tasks")


def rejections(target: str, *own: str, **arguments: Any) -> dict[str, str]:
    component = Component.model_validate({"_target_": target, **arguments})
    try:
        resolve(component, key="model", allowed=(*BUILT_IN, *own))
    except ExperimentError as error:
        return {problem.key: problem.message for problem in error.problems}
    return {}


class TestReachable:
    def test_functions_and_classes_of_no_kind_are_listed(self, reached: dict[str, Callable[..., Any]]) -> None:
        assert len(reached) > 500
        assert {
            home for home, found in reached.items() if not (inspect.isclass(found) and issubclass(found, KINDS))
        } == OF_NO_KIND

    def test_no_constructor_loads_code(self, reached: dict[str, Callable[..., Any]]) -> None:
        assert {home: names for home, found in reached.items() if (names := loading_in(found))} == READ

    def test_no_argument_names_code(self, reached: dict[str, Callable[..., Any]]) -> None:
        named: dict[str, set[str]] = {}
        for found in reached.values():
            for name in naming_in(found):
                named.setdefault(name, set()).add(found.__qualname__)
        assert named == NAMED


class TestRejected:
    @pytest.mark.parametrize(
        ("target", "reason"),
        [
            ("torch.utils.data.datapipes.gen_pyi.gen_from_template", "can load and run code"),
            ("torch.utils.data.datapipes.iter.RoutedDecoder", "can load and run code"),
            ("torch.utils.data.IterDataPipe", "can load and run code"),
            ("torchmetrics.multimodal.CLIPScore", "can load and run code"),
            ("torchmetrics.text.BERTScore", "can load and run code"),
            ("torch.utils.data.DataLoader", "is not a model, loss, optimizer, scheduler, dataset, sampler, transform"),
            ("torch.nn.modules.module.register_module_forward_hook", "is not on the list of allowed functions"),
            ("pipeline.data.make_once", "is not on the list of allowed functions"),
        ],
    )
    def test_the_reason_and_the_remedy(self, target: str, reason: str) -> None:
        message = rejections(target)["model._target_"]
        assert message.startswith(f"{target} {reason}")
        assert f"call {target} in a function of your package" in message
        assert 'packages = ["myproject"] below [tool.pipeline]' in message

    def test_arguments_that_name_code_at_any_depth(self) -> None:
        arguments = {
            "modules": [{"_target_": "a.b", "loader": 1}, {"loader": "x"}],
            "config": {"inner": {"trust_remote_code": True}},
            "attn_implementation": {"text_config": "someone/kernel"},
            "backbone": "local-dir:folder",
        }
        found = rejections("torch.nn.ModuleDict", **arguments)
        assert list(found) == [
            "model.modules[1].loader",
            "model.config.inner.trust_remote_code",
            "model.attn_implementation.text_config",
            "model.backbone",
        ]
        assert found["model.backbone"].startswith("backbone local-dir:folder can make a library run code. Remove it.")
        assert rejections("pipeline.models.pretrained", path="x", auto_map={})
        given = {"ray_remote_args": {"runtime_env": {"pip": ["x"]}}}
        assert [one.key for one in find_rejected_arguments(given, key="data")] == ["data.ray_remote_args.runtime_env"]

    def test_arguments_with_the_same_names_that_name_no_code(self) -> None:
        own = {"attn_implementation": "flash_attention_2", "backbone": "resnet50.a1_in1k", "model_name": "hf-hub:a/b"}
        assert rejections("torch.nn.ModuleDict", **own) == {}

    def test_own_packages_take_all_arguments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "their_clip.py").write_text("def net(loader, trust_remote_code): pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert rejections("their_clip.net", "their_clip", loader=1, trust_remote_code=True) == {}


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
            (["data._target_=torch.utils.data.default_convert"], "data._target_"),
            (["model.in_features={_target_: os.system, command: x}"], "model.in_features._target_"),
            (["+data.config={weights_only: false}"], "data.config.weights_only"),
        ],
    )
    def test_by_an_override(self, overrides: list[str], key: str) -> None:
        assert key in self.keys([each.removeprefix("+") for each in overrides])
        assert not Path("built").exists()

    def test_by_a_value_of_a_sweep(self) -> None:
        values = ["torch.optim.SGD", "torch.optim.optimizer.register_optimizer_step_pre_hook"]
        sweep = {"parameters": {"optimizer._target_": {"grid": values}}}
        assert self.keys([], sweep=sweep) == ["sweep.parameters.optimizer._target_"]
        assert not Path("built").exists()


def test_a_file_that_hides_a_library_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm" / "models").mkdir(parents=True)
    (tmp_path / "timm" / "models" / "__init__.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, module)
    message = rejections("timm.models.resnet18")["model._target_"]
    assert message.startswith(
        f"{tmp_path}/timm has the name of the library timm, and would be imported instead. Rename"
    )
    assert rejections("timm.models.resnet18", "timm")["model._target_"].startswith(
        "importing timm.models failed: Asser"
    )


class TestHiddenLibraries:
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["net", "sklearn", "pipeline"]\n')
        shutil.copy(PROJECT / "lab.yaml", tmp_path)

    @staticmethod
    def check(launcher: str = "torchrun", *, before_user_code: bool = True) -> None:
        check_libraries(launcher=launcher, before_user_code=before_user_code)

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("queue.py", "queue.py: is imported instead of Python's module queue. Rename it."),
            ("profile.py", "profile.py: is imported instead of Python's module profile. Rename it."),
            ("mlflow.py", "mlflow.py: is imported instead of the library mlflow. Rename it."),
            ("pipeline/__init__.py", "pipeline: is imported instead of the library pipeline. Rename it."),
            ("src/torch/__init__.py", "src/torch: is imported instead of the library torch. Rename it."),
        ],
    )
    def test_are_named(self, file: str, message: str) -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
        with pytest.raises(UsageError) as caught:
            _check_here(load("lab.yaml"), with_data=False, receive=pytest.fail)
        assert str(caught.value) == message

    def test_a_name_that_hides_nothing_is_accepted(self) -> None:
        folders = ("mlflow/meta.yaml", "tests/__init__.py", "queue.old/__init__.py")
        for file in (*folders, "net.py", "time.py", "turtledemo.py", "ray.py", "sklearn.py"):
            Path(file).parent.mkdir(exist_ok=True)
            Path(file).touch()
        Path("pipeline").symlink_to(Path(pipeline.__file__).parent)  # a checkout of it
        self.check()
        with pytest.raises(UsageError, match=r"ray\.py: is imported instead of the library ray"):
            self.check("ray")

    def test_a_module_that_user_code_has_imported_is_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("turtledemo")
        module.__file__ = str(Path("turtledemo.py").absolute())
        Path("turtledemo.py").touch()
        monkeypatch.setitem(sys.modules, "turtledemo", module)
        self.check(before_user_code=False)
        with pytest.raises(UsageError, match="Python's module turtledemo"):
            self.check()

    def test_explain_an_import_that_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("turtledemo.py").write_text("import nothing_at_all\n")
        Path("net.py").write_text("import nothing_at_all\n")
        monkeypatch.syspath_prepend(Path.cwd())
        for name, said in (("turtledemo", "turtledemo.py: is imported instead of Python's module"), ("net", "None")):
            with pytest.raises(ImportError) as caught:
                importlib.import_module(name)
            assert said in str(explain_failed_import(caught.value))
