"""Weights that a training starts from: found, renamed, compared with the model, loaded once."""

# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself

import os
import shutil
from pathlib import Path
from typing import Any

import checkpointed
import pytest
import torch
import toys
from checkpointed import EVERY
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.drive.checkpoints import find_initial
from pipeline.drive.preflight import find_parameter_problems
from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.train import StartFrom
from pipeline.protocol.events import Loaded, Started
from pipeline.protocol.trial import Weights
from pipeline.train.saved_state import STATE
from pipeline.train.storage import folder_name
from pipeline.train.weights import fit, renamed

NET = {"_target_": "toys.NormedNet"}
JOURNALS = Path(__file__).parents[1] / "journals"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Weights of a net, in fp32."""
    torch.manual_seed(5)
    path = tmp_path / "net.safetensors"
    save_file(toys.NormedNet().state_dict(), path)
    return path


def wanted(path: Path, **options: Any) -> tuple[StartFrom, Weights]:
    return StartFrom(file=str(path), **options), Weights(path=str(path), source=path.name)


def run(path: Path, *, folder: Path | None = None, **sections: Any) -> toys.Kept:
    start, initial = wanted(path, **sections.pop("start_from", {}))
    train = {"start_from": start.model_dump(), **sections.pop("train", {})}
    return checkpointed.run(folder or "", model=NET, train=train, initial=initial, **sections)


def loaded(outbox: toys.Kept) -> Loaded | None:
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    return started.loaded


def test_the_training_begins_with_them_and_tells(saved: Path) -> None:
    outbox = run(saved, train={"freeze": ["body.*"]})
    before, after = load_file(saved), outbox.weights

    assert str(loaded(outbox)) == "starts from net.safetensors: 9 tensors loaded"
    assert torch.equal(after["body.0.weight"], before["body.0.weight"].double())
    assert not torch.equal(after["head.weight"], before["head.weight"].double())


def test_a_resumed_training_loads_them_before_its_first_checkpoint_only(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert loaded(run(saved, folder=folder, resume=True)) is not None
    saved.unlink()
    resumed = run(saved, folder=folder, resume=True, train={"epochs": 3})
    assert (loaded(resumed), resumed.resumed) == (None, [6])


def test_without_a_usable_checkpoint_it_says_so(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run(saved, folder=folder, checkpoint={"keep": 1})
    for file in folder.glob(f"*/{STATE}"):
        file.write_bytes(b"")
    with pytest.raises(ExperimentError, match=r"train\.start_from: was not loaded because .* no usable checkpoint"):
        run(saved, folder=folder, resume=True)
    shutil.rmtree(folder)
    folder.write_text("no folder")
    with pytest.raises(TrainingError, match=r"the checkpoints in .* can't be read: NotADirectoryError"):
        run(saved, folder=folder / "checkpoints", resume=True)


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    shapes = {"body.0.weight": (4, 3), "body.1.weight": (9,), "neck.weight": (1, 4), "neck.bias": (1,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(ExperimentError) as raised:
        fit(toys.NormedNet(), *wanted(path))
    missing, unused, misshapen = (str(problem) for problem in raised.value.problems)
    assert "lacks body.0.bias, body.1.bias, " in missing
    assert "head.weight, head.bias, which the model has; name its prefix in rename" in missing
    assert "has neck.bias, neck.weight, which the model lacks" in unused
    assert "body.1.weight: (9,) in the file, (4,) in the model" in misshapen


def test_without_strict_it_is_told_what_was_left(tmp_path: Path) -> None:
    path = tmp_path / "wide.safetensors"
    save_file({**toys.NormedNet(outputs=7).state_dict(), "more.weight": torch.zeros(1)}, path)
    found = loaded(run(path, start_from={"strict": False}))
    left = ("head.weight", "head.bias")
    assert found == Loaded(source="wide.safetensors", tensors=7, left=left, unused=("more.weight",))
    assert str(found).endswith("7 tensors loaded, head.weight, head.bias left as initialised, more.weight not used")
    save_file({f"model.{name}": one for name, one in toys.NormedNet().state_dict().items()}, path)
    with pytest.raises(ExperimentError, match=r"wide\.safetensors matches .*The file has model\.body.*; set rename"):
        fit(toys.NormedNet(), *wanted(path, strict=False))


def test_a_name_that_is_tied_need_not_be_saved(tmp_path: Path) -> None:
    net = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    net["last"].weight = net["first"].weight
    path = tmp_path / "tied.safetensors"
    save_file({name: one for name, one in net.state_dict().items() if name != "last.weight"}, path)

    assert fit(net, *wanted(path)).missing == ()


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"a": "x"}, ["x.b.w", "x", "ab.w"]),
        ({"a": "x", "a.b": "y"}, ["y.w", "x", "ab.w"]),
        ({"": "m"}, ["m.a.b.w", "m.a", "m.ab.w"]),
        ({"a.b": ""}, ["w", "a", "ab.w"]),
        ({"ab.": "c."}, ["a.b.w", "a", "c.w"]),
    ],
)
def test_beginnings_of_names_are_renamed(rename: dict[str, str], expected: list[str]) -> None:
    assert list(renamed(["a.b.w", "a", "ab.w"], rename).values()) == expected


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ({"bodie": "body"}, r"start_from\.rename: bodie matches no saved name, .*; there are body\.w, head\.w"),
        ({"body": "head"}, r"gives several tensors the name head\.w"),
    ],
)
def test_a_renaming_that_cannot_be_meant_is_refused(rename: dict[str, str], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        renamed(["body.w", "head.w"], rename)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nett.safetensors", r"start_from\.file: .*nett\.safetensors is no file; did you mean .*net\.saf"),
        ("net.pt", r"is .*net\.pt, but only \.safetensors files can be read: other formats may run code"),
        ("", r"start_from\.file: .* is no file"),
    ],
)
def test_a_file_that_is_not_there(saved: Path, name: str, said: str) -> None:
    saved.with_suffix(".pt").touch()
    experiment = toys.experiment(train={"start_from": {"file": str(saved.parent / name)}})
    with pytest.raises(ExperimentError, match=said):
        find_initial(experiment)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", r"start_from\.run: nothing: no such run in"),
        ("killed", r"start_from\.run: is killed, but .*killed has neither model/weights\.pt nor an intact checkpoint"),
        ("sweep", r"is sweep, but .*sweep is a sweep\. Name one of its trials, for example sweep/trial-001"),
        ("single", r"is single, but .*single has neither .* checkpoint\. Name another run"),
    ],
)
def test_a_run_without_weights(name: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(JOURNALS, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "single" / "model", ignore_errors=True)
    with pytest.raises(ExperimentError, match=said):
        find(name, tmp_path / "runs")


def find(name: str, directory: Path) -> Weights:
    found = find_initial(toys.experiment(train={"start_from": {"run": name}}, tracking={"directory": str(directory)}))
    assert found is not None
    return found


def test_the_weights_of_a_run_are_named(tmp_path: Path) -> None:
    shutil.copytree(JOURNALS / "finished", tmp_path / "20260101-digits-1c7d")
    found = find("1c7d", tmp_path)

    assert found.path == str(tmp_path / "20260101-digits-1c7d" / "model" / "weights.pt")
    assert found.source.startswith("run 20260101-digits-1c7d, the weights of its last step, ")


def test_a_run_that_did_not_complete_gives_its_newest_intact_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-digits-1c7d"
    shutil.copytree(JOURNALS / "killed", folder)
    checkpointed.run(folder / "checkpoints", model=NET, loss={"_target_": "toys.Uncertain"}, **EVERY)
    os.truncate(folder / "checkpoints" / folder_name(6) / STATE, 100)
    found = find("1c7d", tmp_path)
    weights = torch.load(folder / "checkpoints" / folder_name(5) / STATE, weights_only=True)["model"]
    start = {"start_from": {"run": "1c7d"}, "freeze": ["body.*"]}
    outbox = checkpointed.run("", model=NET, train=start, initial=found)

    assert str(loaded(outbox)) == "starts from run 20260101-digits-1c7d, the checkpoint of step 5: 9 tensors loaded"
    assert torch.equal(outbox.weights["body.0.weight"], weights["model.body.0.weight"])
    assert not torch.equal(outbox.weights["head.weight"], weights["model.head.weight"])


def test_all_problems_are_found_without_memory_for_a_model(saved: Path) -> None:
    experiment = toys.experiment(
        model={"_target_": "toys.NormedNet", "width": 5},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "groups": [{"match": "hed.*", "lr": 0.1}]},
        train={"start_from": {"file": str(saved)}, "freeze": ["bodi.*"]},
    )
    found = find_parameter_problems(experiment, allowed=("toys", "torch.nn", "torch.optim"))

    assert [problem.key for problem in found] == ["train.start_from", "train.freeze[0]", "optimizer.groups[0].match"]
    assert "body.0.weight: (4, 3) in the file, (5, 3) in the model" in found[0].message
