"""The programs of examples/ train what the experiments next to them train: the same loss in each step.

The programs run unchanged. What no two libraries have in common is given to them from outside, see
`theirs`: initial weights, the order of the samples, and what augmentation and noise draw.
"""

# promise: the programs of `examples/` and their experiments have the same losses
# promise: the script of the tutorial and its experiment have the same losses, with two workers

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data import example_sentences
from pipeline.record import loss_file

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "augmented": "lightning", "vae": "lightning", "duel": "lightning", "topics": "transformers",
    "characters": "transformers", "mixed": "accelerate", "resumed": "accelerate", "progression": "torch",
    "balanced": "torch", "contrastive": "torch", "vit": "torch",
}  # fmt: skip
"""Names of the programs, and what they need."""
STEPS = {
    "augmented": 69,
    "vae": 66,
    "duel": 58,
    "topics": 40,
    "characters": 20,
    "mixed": 69,
    "progression": 154,
    "balanced": 42,
    "contrastive": 60,
    "vit": 46,
}
TOLERANCE = 1e-5
ALONE = ("--train-only", "parallel.launcher=inprocess", "parallel.strategy=single", "tracking.log_model=false")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(ROOT / "examples", copy)
    return copy


def theirs(folder: Path, name: str, *arguments: str, first_epoch: int = 0, program: str = "") -> list[float]:
    losses = folder / f"{name}.json"
    script = Path(__file__).with_name("theirs.py")
    line = [sys.executable, script, f"{name}.yaml", losses, str(first_epoch), program or f"{name}.py", *arguments]
    ended = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[float] = json.loads(losses.read_text())
    return found


def ours(folder: Path, name: str, *arguments: str, how: tuple[str, ...] = ALONE) -> list[float]:
    command = [sys.executable, "-m", "pipeline", "run", f"{name}.yaml", *how, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = (folder / "runs").glob(f"*-{name}-*")
    return list(loss_file.read(run))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "resumed"])
def test_both_have_the_same_loss_in_each_step(examples: Path, name: str) -> None:
    pytest.importorskip(PROGRAMS[name])
    folder = examples / name
    if name == "topics":
        example_sentences(str(folder / "tiny-encoder"), steps=1)
    before = theirs(folder, name)
    if name == "duel":  # a loss for each of two optimizers
        before = [critic + generator for critic, generator in zip(before[::2], before[1::2], strict=True)]
    assert len(before) == STEPS[name]
    assert len(set(before)) == STEPS[name]
    assert ours(folder, name) == pytest.approx(before, rel=0, abs=TOLERANCE)


def test_both_continue_a_training(examples: Path) -> None:
    pytest.importorskip("accelerate")
    folder = examples / "resumed"
    before = theirs(folder, "resumed", "2") + theirs(folder, "resumed", "4", first_epoch=2)
    ours(folder, "resumed")
    (run,) = (folder / "runs").glob("*-resumed-*")
    assert len(before) == 4 * 23
    assert ours(folder, "resumed", "train.epochs=4", "--resume", run.name) == pytest.approx(before, abs=TOLERANCE)


def test_the_tutorial_trains_with_two_workers_what_its_script_does(examples: Path) -> None:
    folder = examples / "tutorial"
    before = theirs(folder, "digits", program="script.py")
    assert len(set(before)) == len(before) == 138
    assert ours(folder, "digits", how=("--train-only",)) == pytest.approx(before, rel=0, abs=TOLERANCE)


def test_each_program_is_compared() -> None:
    folders = {file.parent.name for file in (ROOT / "examples").glob("*/*.yaml")}
    assert folders - {"detection"} == {*PROGRAMS, "tutorial"}  # test_detection_ranks.py trains it
