"""``pipeline export``: files of a trained model, and a README that says how to load them."""

# promise: what leaves the tool computes what was evaluated; changed data is named on resume
# promise: an older checkpoint is never the last in silence
# promise: `export`: the weights of the result, loaded where `pipeline` can't be imported

import importlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlflow  # noqa: F401 - its import starts uname, and a test may start no process
import numpy
import pytest
import torch
from blocks import code
from safetensors.torch import load_file
from screens import check
from torch import Tensor, nn
from toy_runs import toy_run
from toys import ComparedNet, regression

from pipeline import Trained
from pipeline.commands import export as exporting
from pipeline.commands.export import Exported, Inputs, check_options, export_model, format_readme, make_result
from pipeline.errors import ExperimentError, ResourceError, UsageError
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.protocol.events import EXAMPLE, Finished
from pipeline.record import journal
from pipeline.results.terminal import format_screen
from pipeline.tasks import Loss
from pipeline.train.exported import write_mlflow_model
from pipeline.train.storage import folder_name

HERE = "test_export"


class DrawnScales(nn.Linear):
    """Scales of three generators outside the state_dict."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.plain, self.array = torch.rand(3) + 1, numpy.random.rand(3)
        self.register_buffer("buffer", torch.full((3,), random.random()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(
            (inputs * self.plain * self.buffer).to(inputs.dtype) * torch.from_numpy(self.array).float()
        )


class CountedCalls(nn.Linear):
    """Each call of the training, or each call, changes what it computes."""

    def __init__(self, *, always: bool) -> None:
        super().__init__(3, 1)
        self.always, self.calls = always, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training or self.always
        return super().forward(inputs) * (1 + self.calls)


class Centered(nn.Linear):
    """Subtracts a running mean, which the state_dict lacks."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(inputs.detach().mean(0) + 1)
        return super().forward(inputs - self.mean)


class BodyTask:
    """Calls a part of the model."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model.body(batch[0])
        return Loss(outputs.pow(2).mean() * len(outputs), None, outputs, batch[1])


class Undecided(nn.Linear):
    """Computes what depends on values of its inputs, so it can't be exported as one program."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


COMPARED = {"model": {"_target_": "toys.ComparedNet"}, "loss": None}
FILES = ["README.md", "experiment.yaml", "model.json", "model.pt2", "model.safetensors"]
BEST = {"best": "validation/loss", "mode": "max", "keep": 2}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose best step is 3 of 9."""
    lab: Path = tmp_path_factory.mktemp("lab")
    toy_run(lab, checkpoint=BEST, train={"epochs": 3})
    return lab


@pytest.fixture
def run(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab)
    return next((lab / "runs").iterdir())


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a run of its own in the current folder."""
    monkeypatch.chdir(tmp_path)
    return partial(toy_run, tmp_path)


def exported(run: Path, to: Path, *, checkpoint: str | None = None, overrides: Sequence[str] = ()) -> Exported:
    return export_model(load(run / "experiment.yaml", overrides), folder=run, to=to, checkpoint=checkpoint)


def mlflow_model(run: Path) -> None:
    experiment = load(run / "experiment.yaml").experiment
    write_mlflow_model(experiment, run / "mlflow", folder=run, allowed=allowed_packages(), warn=pytest.fail)


def test_the_weights_are_those_of_the_result(run: Path, tmp_path: Path) -> None:
    """Without a choice they are read from the run's folder, with one from a checkpoint: they are the same."""
    found = exported(run, tmp_path / "result")
    of_checkpoint = exported(run, tmp_path / "best", checkpoint="best")
    last = exported(run, tmp_path / "last", checkpoint="last")

    assert found.weights.step == of_checkpoint.weights.step == 3
    assert found.weights.best == of_checkpoint.weights.best == "validation/loss"
    assert found.weights.metrics == of_checkpoint.weights.metrics
    assert (last.weights.step, last.weights.epoch, last.weights.best) == (9, 3, "")
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("result", "best", "last")]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not torch.equal(tensors[0]["weight"], tensors[2]["weight"])
    assert tensors[0]["weight"].dtype == torch.float64


def test_checkpoints_that_cannot_be_read_are_told(made: Callable[..., Path], tmp_path: Path) -> None:
    """Where they are looked for at first only to learn whether there are any."""
    run = made(checkpoint=BEST)
    (run / EXAMPLE).unlink()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ResourceError, match=r"the checkpoints cannot be read. NotADirectoryError"):
        exported(run, tmp_path / "out", overrides=[f"checkpoint.directory={tmp_path / 'file' / 'checkpoints'}"])


def test_the_files_describe_themselves_and_replace_those_of_an_earlier_export(run: Path, tmp_path: Path) -> None:
    for name in ("mine.txt", "model.onnx"):
        (tmp_path / name).touch()
    found = exported(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "mine.txt"])
    about = json.loads((tmp_path / "model.json").read_text())
    assert about == found.model_dump(mode="json")
    assert (about["run"], about["weights"]["step"]) == (run.name, 3)
    assert about["inputs"] == {"shape": [None, 3], "dtype": "float64"}
    assert about["model"] == {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1}
    assert load(tmp_path / "experiment.yaml").experiment == load(run / "experiment.yaml").experiment


def test_the_screen_of_an_export(run: Path, tmp_path: Path) -> None:
    found = exported(run, tmp_path / "model").model_copy(update={"run": "20261125-211028-toy-3c35"})
    for path in (tmp_path / "model").iterdir():
        path.write_bytes(b"a" * 1234)
    lines = format_screen(make_result(found, tmp_path / "model"))
    check("export", "\n".join([*lines, ""]).replace(str(tmp_path), "/data"))


def test_averaged_weights_and_an_interrupted_run(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made(status="KILLED", train={"ema": {"decay": 0.5}}, model={"_target_": "toys.batch_norm_net"})
    found = exported(folder, tmp_path / "out")
    expected = torch.load(folder / "model" / "weights.pt")  # of the same step, the averages
    assert found.weights.step == 6
    program = torch.export.load(tmp_path / "out" / "model.pt2").state_dict
    for tensors in (load_file(tmp_path / "out" / "model.safetensors"), program):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())


# The model that was evaluated


def loss(model: Callable[[torch.Tensor], torch.Tensor]) -> float:
    inputs, targets = regression()[1].tensors  # type: ignore[union-attr]
    dtype = next(model.parameters()).dtype if isinstance(model, torch.nn.Linear) else torch.float32
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(inputs.to(dtype)), targets).item()


@pytest.mark.parametrize("name", [f"{HERE}.DrawnScales", "toys.Adapted"])
def test_what_leaves_computes_what_was_evaluated(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Drawn again with the training's seed, in the types that the constructor chose; no generator is left changed."""
    folder = made(model={"_target_": name}, train={"precision": "fp32"}, exports=True)
    exported(folder, tmp_path / "weights")
    exported(folder, tmp_path / "checkpoint", checkpoint="last")
    monkeypatch.chdir(tmp_path / "weights")
    script: dict[str, Any] = {}
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    models = [
        Trained.load(folder).model,
        torch.export.load(tmp_path / "checkpoint" / "model.pt2").module(),
        torch.export.load(folder / "model" / "mlflow" / "data" / "model.pt2").module(),
    ]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]
    exec(code(Path("README.md").read_text())[1], script)
    (*_, last) = (event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Finished))
    expected = last.result.metrics["validation/loss"]
    assert [loss(model) for model in (*models, script["model"])] == pytest.approx([expected] * 4, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"_target_": f"{HERE}.CountedCalls", "always": False},
            "The value of calls differs, and the state_dict lacks",
        ),
        (
            {"_target_": f"{HERE}.CountedCalls", "always": True},
            "Each call changes calls, and the outputs depend on it",
        ),
        ({"_target_": f"{HERE}.Centered"}, "The value of mean differs, and the state_dict lacks it"),
    ],
)
def test_a_model_that_differs_from_the_evaluated_one_does_not_leave(
    made: Callable[..., Path], tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    folder = made(model=model, exports=True)
    expected = rf"model: rebuilt from its weights, the model has other outputs than the evaluated model\. {message}"
    for leave in (
        partial(exported, folder, tmp_path / "result"), partial(Trained.load, folder), partial(mlflow_model, folder)
    ):  # fmt: skip
        with pytest.raises(ExperimentError, match=expected):
            leave()
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["example.pt", "reference.pt", "weights.pt"]
    assert not (tmp_path / "result").exists()


# What can't work


def test_a_folder_in_use_and_missing_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").touch()
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    for options, said in {
        (False, tmp_path, False): "is not empty; name another folder, or add --force",
        (False, tmp_path / "mine.txt", True): "is a file; name a folder",
        (True, tmp_path, True): r"--onnx needs onnx and onnxscript\. Install: pip install onnx onnxscript",
    }.items():
        with pytest.raises(UsageError, match=said):
            check_options(**dict(zip(("onnx", "to", "force"), options, strict=True)))  # type: ignore[arg-type]
    check_options(onnx=False, to=tmp_path, force=True)
    check_options(onnx=False, to=tmp_path / "new", force=False)


def test_what_cannot_be_written_or_loaded_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="--to /proc/model can't be written"):
        exported(run, Path("/proc/model"))
    with pytest.raises(UsageError, match=r"the weights don't match toys.wide_net: .* Use the code of the training run"):
        exported(run, tmp_path / "out", overrides=["model={_target_: toys.wide_net}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_a_model_that_cannot_be_traced_is_told(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made(model={"_target_": f"{HERE}.Undecided", "in_features": 3, "out_features": 1})
    found = exported(folder, tmp_path / "out")
    assert found.no_program.startswith("torch can't trace test_export.Undecided: ")
    assert len(found.no_program.splitlines()) == 1
    assert not (tmp_path / "out" / "model.pt2").exists()
    assert f"There is no program: {found.no_program}" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UsageError, match=r"--onnx: torch can't trace test_export.Undecided: .* Leave out --onnx\."):
        export_model(load(folder / "experiment.yaml"), folder=folder, to=tmp_path / "onnx", onnx=True)
    assert not (tmp_path / "onnx").exists()


# Inputs


def test_inputs_are_what_the_task_gives_the_model(made: Callable[..., Path], tmp_path: Path) -> None:
    """Batches are mappings here, of which the model gets one tensor."""
    folder = made(data={"_target_": "toys.named"}, task={"_target_": "toys.NamedTask"}, loss=None)
    assert exported(folder, tmp_path / "out").inputs == Inputs(shape=(None, 3), dtype="float64")
    inputs = torch.rand(5, 3, dtype=torch.float64)
    outputs = torch.export.load(tmp_path / "out" / "model.pt2").module()(inputs)
    weights = torch.load(folder / "model" / "weights.pt")
    assert torch.equal(outputs, torch.nn.functional.linear(inputs, weights["weight"], weights["bias"]))


def test_a_model_of_several_inputs_is_a_program_of_named_ones(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made(task={"_target_": "toys.ComparedTask"}, exports=True, **COMPARED)
    found = exported(folder, tmp_path / "out").inputs
    assert isinstance(found, dict)
    assert {name: one.shape for name, one in found.items()} == {"first": (None, 3), "second": (None, 3)}
    model = ComparedNet().double()
    model.load_state_dict(torch.load(folder / "model" / "weights.pt"))
    first, second = torch.rand(2, 5, 3, dtype=torch.float64)
    expected = model(first, second)
    assert torch.equal(torch.export.load(tmp_path / "out" / "model.pt2").module()(first=first, second=second), expected)
    of_mlflow = torch.export.load(folder / "model" / "mlflow" / "data" / "model.pt2")
    assert torch.equal(of_mlflow.module()(first, second), expected)


@pytest.mark.parametrize(
    ("task", "inputs", "reason"),
    [
        # Of a model whose parts are called, they are the first of a batch.
        (
            {"_target_": f"{HERE}.BodyTask"},
            Inputs(shape=(None, 3), dtype="float64"),
            "torch can't trace toys.ComparedNet",
        ),
        ({"_target_": "toys.ComparedTask", "more": 2.5}, None, "the model's inputs are not only tensors"),
    ],
)
def test_inputs_that_are_no_call_of_the_model(
    made: Callable[..., Path], tmp_path: Path, task: dict[str, Any], inputs: Inputs | None, reason: str
) -> None:
    found = exported(made(task=task, **COMPARED), tmp_path / "out")
    assert found.inputs == inputs
    assert found.no_program.startswith(reason)


def test_weights_without_a_checkpoint_of_their_step_are_the_result(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made(tracking={"log_model": False})
    shutil.rmtree(folder / "checkpoints" / folder_name(6))
    assert exported(folder, tmp_path / "result").weights.step == 6
    older = exported(folder, tmp_path / "last", checkpoint="last").weights
    assert (older.step, older.note) == (3, "The latest checkpoint is from step 3, but training ended at step 6.")


# The README


def readme(model: dict[str, Any], **more: Any) -> str:
    given = {"inputs": {"": ((2, 3), "float32")}, "no_program": "", "is_double": False, "seed": 7}
    return format_readme(model, origin="run a", **(given | more))


def test_the_readme_says_how_to_call_it_in_ten_lines_of_code_at_most() -> None:
    text = readme({"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1})
    assert sum(1 for block in code(text) for line in block.splitlines() if line) <= 10
    assert "outputs = program(torch.zeros((2, 3), dtype=torch.float32))" in text
    inputs = {"tokens": ((2, 3), "int64"), "mask": ((2, 3), "bool")}
    call = "program(tokens=torch.zeros((2, 3), dtype=torch.int64), mask=torch.zeros((2, 3), dtype=torch.bool))"
    assert call in readme({"_target_": "torch.nn.Identity"}, inputs=inputs)
    text = readme({"_target_": "torch.nn.Identity"}, no_program="it can't be traced")
    assert "There is no program: it can't be traced." in text
    assert "model.pt2" not in text


def test_the_readme_builds_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function that is named like its module, and a class method."""
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "__init__.py").write_text("from named.tower import Tower, tower\n")
    (tmp_path / "named" / "tower.py").write_text(
        "def tower(*, inner): return [inner]\n"
        "class Tower:\n    @classmethod\n    def of(cls, **given): return {**given}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("named")
    inner = {"_target_": "named.Tower.of", "words": ["a", "${oc.env:X}"], "sizes": {"b": 1.5}}
    (_, weights) = code(readme({"_target_": "named.tower", "inner": inner}))
    script: dict[str, Any] = {}
    try:
        exec(weights.partition("model.load_state_dict")[0], script)
    finally:
        for name in ("named", "named.tower"):
            del sys.modules[name]
    assert script["model"] == [{"words": ["a", "${oc.env:X}"], "sizes": {"b": 1.5}}]
