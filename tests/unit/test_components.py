"""Components: which names are allowed, what is checked before anything starts, and building."""

# promise: of libraries, an experiment file names no module that is known to run or fetch code

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.drive import preflight
from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment import targets
from pipeline.experiment.components import build, check, resolve
from pipeline.experiment.load import from_mapping
from pipeline.experiment.references import RUNTIME_VALUES, fill_in, marker
from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN, allowed_packages
from pipeline.experiment.values import Component

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the files of a package with a name of its own, and returns the name."""

    def write(**files: str) -> str:
        name = f"their_package_{next(_numbers)}"
        (tmp_path / name).mkdir()
        for module, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{module}.py").write_text(text.replace("PACKAGE", name))
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


def find(target: str, *own: str) -> Any:
    return resolve(Component(target=target), key="model", allowed=(*BUILT_IN, *own))


def refusal(target: str, *own: str) -> str:
    with pytest.raises(ExperimentError) as caught:
        find(target, *own)
    (problem,) = caught.value.problems
    assert problem.key == "model._target_"
    return problem.message


def component(target: str, **arguments: Any) -> Component:
    return Component.model_validate({"_target_": target, **arguments})


SCHEDULERS = "torch.optim.lr_scheduler"
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


SECTIONS: dict[str, Any] = {
    "name": "e",
    "model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2},
    "data": {"_target_": "torch.nn.Identity"},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": SGD,
    "train": {"epochs": 1, "global_batch_size": 1},
}


def experiment(**changed: Any) -> Experiment:
    return Experiment.model_validate({**SECTIONS, **changed})


def checked(*own: str, **changed: Any) -> dict[str, str]:
    found = check(experiment(**changed), allowed=(*BUILT_IN, *own)).problems
    return {problem.key: problem.message for problem in found}


def test_a_variable_that_is_not_set_is_found_before_anything_starts() -> None:
    loss = {"_target_": "torch.nn.CrossEntropyLoss", "reduction": "${oc.env:NOT_SET}", "weight": ["${oc.env:NO,x}"]}
    (problem,) = check(experiment(loss=loss), allowed=BUILT_IN).problems
    assert str(problem) == (
        "loss.reduction: is '${oc.env:NOT_SET}'; the environment variable NOT_SET is not set. "
        "Set it, or write ${oc.env:NOT_SET,default}."
    )


def test_a_secret_that_is_not_set_is_an_error_before_the_run() -> None:
    logger = {"_target_": "torch.nn.Identity", "url": "${oc.env:NO_SUCH_TOKEN}"}
    model = {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2, "bias": "${oc.env:NO_SUCH_TOKEN}"}
    found = checked(tracking={"loggers": [logger]}, model=model)
    assert list(found) == ["model.bias", "tracking.loggers[0].url"]
    assert "NO_SUCH_TOKEN is not set" in found["model.bias"]
    nodes = {"launcher": "ray", "address": "head:6379"}  # where the model's may be set
    assert list(checked(parallel=nodes, tracking={"loggers": [logger]}, model=model)) == ["tracking.loggers[0].url"]


class TestAllowedPackages:
    def test_without_a_project_the_built_in_ones(self, tmp_path: Path) -> None:
        assert allowed_packages(tmp_path) == BUILT_IN

    def test_the_project_adds_its_own_from_any_folder_below(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["mine", "torch.nn"]\n')
        below = tmp_path / "a" / "b"
        below.mkdir(parents=True)
        (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n")
        assert allowed_packages(below) == (*BUILT_IN, "mine")
        monkeypatch.chdir(below)
        assert allowed_packages() == (*BUILT_IN, "mine")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("[tool.pipeline", "can't be read"),
            ("[tool]\npipeline = 3", 'tool.pipeline is 3; below [tool.pipeline] write packages = ["myproject"]'),
            ('[tool.pipeline]\npackage = ["a"]', "tool.pipeline is {'package': ['a']}; below"),
            ('[tool.pipeline]\npackages = "a"', "tool.pipeline is {'packages': 'a'}; below"),
            ("[tool.pipeline]\npackages = [3]", "tool.pipeline is {'packages': [3]}; below"),
            ('[tool.pipeline]\npackages = ["my-project"]', "tool.pipeline is {'packages': ['my-project']}; below"),
            ('[tool.pipeline]\npackages = [""]', "tool.pipeline is {'packages': ['']}; below"),
        ],
    )
    def test_a_malformed_section_names_the_file(self, tmp_path: Path, text: str, expected: str) -> None:
        file = tmp_path / "pyproject.toml"
        file.write_text(text)
        with pytest.raises(UsageError) as caught:
            allowed_packages(tmp_path)
        assert str(caught.value).startswith(f"{file}: ")
        assert expected in str(caught.value)


class TestResolve:
    def test_what_is_allowed(self) -> None:
        assert find("torch.nn.Linear") is torch.nn.Linear
        assert find("torch.optim.lr_scheduler.CosineAnnealingLR") is torch.optim.lr_scheduler.CosineAnnealingLR
        assert find("torch.utils.data.random_split") is torch.utils.data.random_split
        assert find("torch.tensor") is torch.tensor

    @pytest.mark.parametrize(
        "target",
        [
            "os.system", "builtins.eval", "subprocess.Popen", "torch.os.system", "torch.load", "torch.hub.load",
            "torch.nn.modules.module.torch.hub.load", "torch.nn.init.torch.load", "torch.nn.init.math.sqrt",
            "torch.nn.parallel.distributed.os.system", "torch.utils.data.dataloader.os.fork",
            "torch.utils.data.dataloader.multiprocessing.Process", "torch.nn.Module.__subclasses__",
            "torch.nn.Linear.forward.__globals__.get", "torch.nn.Linear.forward", "torch.nn.functional.conv2d",
            "pipeline.cli.main", "pipeline.commands.run.run", "pipeline.registry.load", "pipeline.data.Path.unlink",
            "_io.open",
        ],
    )  # fmt: skip
    def test_what_is_refused(self, target: str) -> None:
        assert refusal(target)

    def test_nothing_is_imported_for_a_name_that_is_not_allowed(self, package: Any) -> None:
        name = package()
        assert f'write packages = ["{name}"] below [tool.pipeline] in pyproject.toml' in refusal(f"{name}.Net")
        assert name not in sys.modules

    def test_only_the_allowed_part_of_a_package_is_imported(self, package: Any) -> None:
        name = package(nets="def net(): pass\n", other="def net(): pass\n")
        assert callable(find(f"{name}.nets.net", f"{name}.nets"))
        assert "is not in an allowed package" in refusal(f"{name}.other.net", f"{name}.nets")
        assert f"{name}.other" not in sys.modules

    def test_a_module_that_cannot_be_imported_is_reported_once_with_its_line(
        self, package: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = package(nets="net = 1\ndata = (\n")
        parts = {part: {"_target_": f"{name}.nets.{part}"} for part in ("model", "data")}
        file = from_mapping({**SECTIONS, **parts})
        monkeypatch.setattr(preflight, "allowed_packages", lambda: (*BUILT_IN, name))
        with pytest.raises(ExperimentError) as caught:
            preflight.check(file)
        (problem,) = caught.value.problems
        assert problem.message == f"importing {name}.nets failed: SyntaxError: '(' was never closed (nets.py:2)"

    @pytest.mark.parametrize(
        ("target", "expected"),
        [
            ("os.system",
             'os.system is not in an allowed package. To allow your package, write packages = ["myproject"]'),
            ("torch.nn.Linera", "torch.nn has no Linera; did you mean Linear?"),
            ("torch.optim.lr_schedular.StepLR", "torch.optim has no lr_schedular; did you mean lr_scheduler?"),
            ("torch.SGD", "torch has no SGD; did you mean torch.optim.SGD?"),
            ("troch.nn.Linear", "troch is not an allowed package; did you mean torch.nn.Linear?"),
            ("torch.load", "torch.load is defined in torch.serialization, which is not allowed. To use it, call "),
            ("torch.nn.modules.linear.math",
             "torch.nn.modules.linear.math is a module, not a class or function. It defines"),
            ("torch.nn.Linear.forward", "torch.nn.Linear.forward is a method. Only methods of the project"),
            ("torch.nn.functional.relu.x",
             "torch.nn.functional.relu.x: torch.nn.functional.relu is not a module or a class"),
            ("torch.nn._reduction.get_enum", "torch.nn._reduction.get_enum is private: names that start with an under"),
        ],
    )  # fmt: skip
    def test_each_refusal_says_what_to_do(self, target: str, expected: str) -> None:
        assert refusal(target).startswith(expected)

    def test_a_name_that_is_missing_in_a_package_is_compared_with_the_names_that_it_defines(self, package: Any) -> None:
        name = package(nets="from torch.utils.data import Dataset\ndef data(): pass\n")
        assert refusal(f"{name}.nets.dataset", name) == f"{name}.nets has no dataset; did you mean data?"

    def test_a_package_that_is_there_is_not_taken_for_a_misspelt_one(self, package: Any) -> None:
        name = package()
        message = refusal(f"{name}.Net", name[:-1])
        assert message.endswith(f'write packages = ["{name[:-1]}", "{name}"] below [tool.pipeline] in pyproject.toml.')
        assert refusal(f"{name}s.Net", name) == f"{name}s is not an allowed package; did you mean {name}.Net?"

    def test_own_packages_with_functions_classes_and_methods(self, package: Any) -> None:
        name = package(nets="class Net:\n    @classmethod\n    def small(cls): return cls()\ndef make(): return 1\n")
        assert find(f"{name}.nets.make", name)() == 1
        assert type(find(f"{name}.nets.Net.small", name)()).__name__ == "Net"

    def test_an_own_package_is_no_way_to_other_packages(self, package: Any) -> None:
        text = "import os, subprocess\nfrom os import system as run\nfrom torch.nn import Linear\n"
        name = package(nets=text + "class Net(Linear):\n    helper = run\nnet = Net(1, 1)\n")
        assert find(f"{name}.nets.Linear", name) is torch.nn.Linear
        assert "leads to the module os" in refusal(f"{name}.nets.os.system", name)
        assert "leads to the module subprocess" in refusal(f"{name}.nets.subprocess.Popen", name)
        assert "is defined in posix, which is not allowed" in refusal(f"{name}.nets.run", name)
        assert "which is not allowed" in refusal(f"{name}.nets.Net.helper", name)
        assert "is a method" in refusal(f"{name}.nets.Net.load_state_dict", name)
        assert "is not a class or function" in refusal(f"{name}.nets.net", name)

    def test_a_missing_package_is_not_a_typo(self, package: Any) -> None:
        name = package(nets="")
        assert refusal(f"{name}.nots.Net", name) == f"{name} has no nots"
        assert refusal("not_there.Net", "not_there").startswith("package not_there not found. Run in your project's")

    def test_a_library_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)  # what Python itself does for a module it must not find
        assert refusal("timm.models.resnet18") == "timm is not installed. Install it, or name another package."

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("x = 1\n\nundefined_name\n", "NameError: name 'undefined_name' is not defined (nets.py:3)"),
            ("def f(:\n", "SyntaxError: invalid syntax (nets.py:1)"),
            ("import not_there_either\n", "ModuleNotFoundError: No module named 'not_there_either' (nets.py:1)"),
            ("import sys\nsys.exit(3)\n", "SystemExit: 3 (nets.py:2)"),
            ("import torch\ntorch.zeros(2, 'a')\n", "(nets.py:2)"),
            ("raise RuntimeError('operator torchvision::nms does not exist\\nmore')\n",
             "RuntimeError: operator torchvision::nms does not exist more (nets.py:1)"),
        ],
    )  # fmt: skip
    def test_a_package_that_fails_shows_its_line(self, package: Any, text: str, expected: str) -> None:
        name = package(nets=text)
        message = refusal(f"{name}.nets.Net", name)
        assert message.startswith(f"importing {name}.nets failed: ")
        assert message.endswith(expected)
        assert "\n" not in message

    def test_a_lazy_module_that_fails_is_a_failed_import(self, package: Any) -> None:
        name = package(__init__="def __getattr__(name):\n    raise ImportError('needs a library')\n")
        assert refusal(f"{name}.Net", name).endswith("ImportError: needs a library (__init__.py:2)")

    @settings(max_examples=12, deadline=None)
    @given(
        st.lists(
            st.sampled_from(
                ["torch", "nn", "optim", "os", "system", "modules", "load", "hub", "Linear", "data", "pipeline"]
            )
            | st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
            min_size=2,
            max_size=5,
        ).map(".".join)
    )
    def test_whatever_is_found_is_defined_in_an_allowed_package(self, target: str) -> None:
        try:
            found = find(target)
        except ExperimentError:
            return
        assert f"{found.__module__}.".startswith(tuple(f"{package}." for package in BUILT_IN))


class TestCheck:
    def test_a_right_experiment_has_no_problems(self) -> None:
        scheduler = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": "${total_steps}"}
        assert checked(scheduler=scheduler) == {}

    def test_all_problems_of_all_components_have_exact_keys(self, package: Any) -> None:
        name = package(
            nets="def net(num_classes, width=1, *, block=None): pass\ndef metric(num_classes): pass\ndef none(): pass\n"
        )
        assert checked(
            name,
            model={"_target_": f"{name}.nets.net", "num_clases": 3, "block": [{"_target_": "torch.nn.Relu"}]},
            data={"_target_": f"{name}.nets.none", "x": 1},
            metrics={"accuracy": {"_target_": f"{name}.nets.metric", "number": 1}},
            loader={"collate": {"_target_": "torch.nn.Sequentiel"}},
            optimizer={"_target_": "torch.optim.SGD", "lrr": 1, "params": 3},
        ) == {
            "model.num_clases": f"{name}.nets.net has no such argument; did you mean num_classes?",
            "model.num_classes": f"missing. {name}.nets.net requires this argument.",
            "model.block[0]._target_": "torch.nn has no Relu; did you mean ReLU?",
            "data.x": f"{name}.nets.none has no such argument; it takes no arguments",
            "metrics.accuracy.number": f"{name}.nets.metric has no such argument; it takes num_classes",
            "metrics.accuracy.num_classes": f"missing. {name}.nets.metric requires this argument.",
            "loader.collate._target_": "torch.nn has no Sequentiel; did you mean Sequential?",
            "optimizer.lrr": "torch.optim.SGD has no such argument; did you mean lr?",
            "optimizer.params": "pipeline passes the model's parameters to torch.optim.SGD as this argument. "
            "Remove it.",
        }

    def test_a_text_is_no_number(self, package: Any) -> None:
        name = package(nets="def net(width: int, deep: bool = False, padding: 'int | str' = 0, free=1): pass\n")
        model = {"_target_": f"{name}.nets.net", "width": "wide", "deep": "no", "padding": "same", "free": "any"}
        assert checked(name, model=model, optimizer={"_target_": "torch.optim.SGD", "lr": "1e-3"}) == {
            "model.width": "is 'wide' (a string). Write a number.",
            "model.deep": "is 'no' (a string). Write true or false.",
            "optimizer.lr": "is '1e-3' (a string). Write a number, without quotes "
            "(from the environment: ${oc.decode:${oc.env:NAME}}).",
        }

    def test_a_variable_is_a_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("W", "64")
        assert checked(optimizer={**SGD, "lr": "${oc.env:W}"}) == {
            "optimizer.lr": "is '64' (a string). Write a number, without quotes "
            "(from the environment: ${oc.decode:${oc.env:NAME}}).",
        }

    def test_the_scheduler_and_those_in_it_are_given_the_optimizer(self, package: Any) -> None:
        name = package(nets="def anything(*args, **kw): pass\n")
        scheduler = {"_target_": "torch.optim.lr_scheduler.StepLR"}
        assert list(checked(scheduler=scheduler)) == ["scheduler.step_size"]
        inner = {"_target_": f"{SCHEDULERS}.LinearLR", "optimizer": 1}
        assert checked(scheduler={"_target_": f"{SCHEDULERS}.ChainedScheduler", "schedulers": [inner]}) == {
            "scheduler.schedulers[0].optimizer": f"pipeline passes the optimizer to {SCHEDULERS}.LinearLR as this "
            "argument. Remove it."
        }
        assert checked(name, scheduler={"_target_": f"{name}.nets.anything", "x": 1}) == {}

    def test_the_sampler_is_given_the_training_set_the_epoch_and_a_generator(self) -> None:
        assert checked(sampler={"_target_": "pipeline.data.by_length", "batch_size": 3}) == {}
        assert checked(sampler={"_target_": "pipeline.data.balanced", "samples": 3}) == {
            "sampler.samples": "pipeline passes the training set to pipeline.data.balanced as this argument. Remove it."
        }

    @pytest.mark.parametrize(
        ("section", "parameters", "remedy"),
        [
            ("loss", "outputs, targets, gain=1", "or write one whose forward(outputs, targets) calls it."),
            ("task", "model, batch", "write a class whose __call__(model, batch) calls it."),
        ],
    )
    def test_for_a_function_of_a_step_a_class_is_asked_for(
        self, package: Any, section: str, parameters: str, remedy: str
    ) -> None:
        name = package(nets=f"def own({parameters}): pass\n")
        sections = {"loss": None, section: {"_target_": f"{name}.nets.own"}}
        (message,) = checked(name, **sections).values()
        assert message.endswith(remedy)

    def test_nested_components_are_found_anywhere(self) -> None:
        inner = {"_target_": "torch.nn.Linear", "in_features": 1}
        model = {"_target_": "torch.nn.ModuleDict", "modules": {"a": {"b": [1, inner]}, "c": {"_target_": 3}}}
        assert checked(model=model) == {
            "model.modules.a.b[1].out_features": "missing. torch.nn.Linear requires this argument.",
            "model.modules.c._target_": "is 3; write _target_: package.name",
        }


class TestBuild:
    def test_arguments_and_nested_components(self) -> None:
        tree = component(
            "torch.nn.ModuleDict",
            modules={"one": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}},
        )
        assert build(tree, key="model", allowed=BUILT_IN)["one"].weight.shape == (2, 3)

    def test_the_optimizer_and_the_scheduler(self) -> None:
        parameters = torch.nn.Linear(1, 1).parameters()
        optimizer = build(component("torch.optim.SGD", lr=0.5), parameters, key="optimizer", allowed=BUILT_IN)
        schedule = component("torch.optim.lr_scheduler.StepLR", step_size=marker("total_steps"))
        filled = fill_in(experiment(scheduler=schedule.model_dump()), {"total_steps": 7}).scheduler
        assert filled is not None
        assert build(filled, optimizer, key="scheduler", allowed=BUILT_IN).step_size == 7

    @pytest.mark.parametrize("kind", ["SequentialLR", "ChainedScheduler"])
    def test_schedulers_in_a_scheduler_get_the_optimizer(self, kind: str) -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5)
        inner = [{"_target_": f"{SCHEDULERS}.ConstantLR"}, {"_target_": f"{SCHEDULERS}.StepLR", "step_size": 3}]
        milestones = {"milestones": [4]} if kind == "SequentialLR" else {}
        declared = component(f"{SCHEDULERS}.{kind}", schedulers=inner, **milestones)
        scheduler = build(declared, optimizer, key="scheduler", allowed=BUILT_IN)
        assert [type(one).__name__ for one in scheduler._schedulers] == ["ConstantLR", "StepLR"]
        assert scheduler.optimizer is optimizer

    def test_a_list_of_class_weights_is_a_tensor(self) -> None:
        loss = build(component("torch.nn.CrossEntropyLoss", weight=[1, 5, 1]), key="loss", allowed=BUILT_IN)
        assert torch.equal(loss.weight, torch.tensor([1.0, 5.0, 1.0]))

    def test_runtime_values_are_numbers_alone_and_digits_in_a_text(self, package: Any) -> None:
        name = package(nets="def keep(**given): return given\n")
        given = {"a": "${total_steps}", "b": ["w${world_size}/${total_steps}"], "c": "${train.epochs}", "d": r"\${x}"}
        model = {"_target_": f"{name}.nets.keep", **given}
        filled = fill_in(experiment(model=model), {"total_steps": 7, "world_size": 2}).model
        assert build(filled, key="model", allowed=(name,)) == {"a": 7, "b": ["w2/7"], "c": 1, "d": "${x}"}

    def test_a_runtime_value_that_is_not_known_yet(self) -> None:
        for name in RUNTIME_VALUES:
            with pytest.raises(ExperimentError) as caught:
                build(component("torch.nn.Flatten", start_dim=marker(name)), key="data", allowed=BUILT_IN)
            assert str(caught.value).startswith(f"data.start_dim: {marker(name)} has no value yet")

    def test_building_leaves_the_experiment_as_it_is(self, package: Any) -> None:
        name = package(nets="def spoil(items): items.append(1); return items\n")
        given = component(f"{name}.nets.spoil", items=[0])
        assert build(given, key="model", allowed=(name,)) == build(given, key="model", allowed=(name,)) == [0, 1]

    def test_an_exception_of_the_callable_keeps_its_cause(self, package: Any) -> None:
        name = package(nets="def net(width): raise ValueError('width must be\\n even')\n")
        with pytest.raises(ExperimentError) as caught:
            build(component(f"{name}.nets.net", width=3), key="model", allowed=(name,))
        assert str(caught.value) == f"model: {name}.nets.net raised ValueError: width must be even (nets.py:1)"
        assert isinstance(caught.value.__cause__, ValueError)

    def test_a_nested_one_is_named_by_its_own_key(self) -> None:
        inner = {"_target_": "torch.nn.Linear", "in_features": "a", "out_features": 2}
        with pytest.raises(ExperimentError, match=r"^model\.modules\.one: torch\.nn\.Linear raised TypeError: "):
            build(component("torch.nn.ModuleDict", modules={"one": inner}), key="model", allowed=BUILT_IN)

    def test_a_callable_may_name_its_own_problem(self, package: Any) -> None:
        text = "from pipeline.errors import ExperimentError\ndef f(): raise ExperimentError.of('data.x', 'wrong')\n"
        name = package(nets=text)
        with pytest.raises(ExperimentError, match=r"^data\.x: wrong$"):
            build(component(f"{name}.nets.f"), key="data", allowed=(name,))

    def test_what_is_not_allowed_is_not_built_either(self) -> None:
        inner = {"_target_": "os.system", "command": "false"}
        with pytest.raises(ExperimentError, match=r"^model\.modules\.a\._target_: os\.system is not in an allowed"):
            build(component("torch.nn.ModuleDict", modules={"a": inner}), key="model", allowed=BUILT_IN)


@pytest.mark.parametrize(
    "target",
    [
        "torch.utils.data.datapipes.gen_pyi.gen_from_template", "torch.utils.data.datapipes.iter.RoutedDecoder",
        "torch.utils.data.IterDataPipe", "torchmetrics.multimodal.CLIPScore", "torchmetrics.text.BERTScore",
    ],
)  # fmt: skip
def test_names_that_run_code_have_a_reason_and_a_remedy(target: str) -> None:
    message = refusal(target)
    assert message.startswith(f"{target} can load and run code. To use it, call {target} in a function of your package")
    assert 'packages = ["myproject"] below [tool.pipeline]' in message
    assert len(targets._RUN_CODE) <= 20  # the list stays short


@pytest.mark.parametrize(
    ("overrides", "sections", "key"),
    [
        (["data._target_=torch.utils.data.datapipes.gen_pyi.gen_from_template"], {}, "data._target_"),
        (["model.in_features={_target_: os.system, command: x}"], {}, "model.in_features._target_"),
        ([], {"sweep": {"parameters": {"optimizer._target_": {"grid": ["torch.optim.SGD", "torch.load"]}}}},
         "sweep.parameters.optimizer._target_"),
    ],
)  # fmt: skip
def test_no_component_is_called_before_all_names_are_allowed(
    package: Any,
    overrides: list[str],
    sections: dict[str, Any],
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The metric would leave a file."""
    monkeypatch.chdir(tmp_path)
    name = package(metric="def leaving():\n    open('built', 'w').close()\n")
    monkeypatch.setattr(preflight, "allowed_packages", lambda: (*BUILT_IN, name))
    file = {**SECTIONS, "data": {"_target_": "pipeline.data.digits"}, **sections}
    file["metrics"] = {"leaving": {"_target_": f"{name}.metric.leaving"}}
    with pytest.raises(ExperimentError) as caught:
        preflight.check(from_mapping(file, overrides), with_data=True)
    assert key in [problem.key for problem in caught.value.problems]
    assert not Path("built").exists()
