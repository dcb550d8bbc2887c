"""The programs of docs/coming-from.md train what the experiments beside them train: the same loss in each step.

The programs run as they are on the page. What no two libraries have in common is given to them from outside, see
`theirs`: initial weights, the order of the samples, and what augmentation and noise draw.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import blocks

from pipeline.data import example_sentences
from pipeline.protocol.events import Metrics, event_from_json

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
FILES = {block.title: block.text for block in blocks(PAGE, root=ROOT) if block.title}
ROWS = re.findall(r"^\| \[.+\]\(#.+\) \| .+ \| (\d+) \| ([\d +]+) \|$", PAGE.read_text(), re.MULTILINE)
PROGRAMS = {
    "augmented": "lightning", "vae": "lightning", "duel": "lightning", "topics": "transformers",
    "characters": "transformers", "mixed": "accelerate", "resumed": "accelerate", "progression": "torch",
    "balanced": "torch",
}  # fmt: skip
"""Names of the programs, in the order of the page, and what they need."""
STEPS = {
    "augmented": 69,
    "vae": 66,
    "duel": 58,
    "topics": 40,
    "characters": 20,
    "mixed": 69,
    "progression": 154,
    "balanced": 42,
}
TOLERANCE = 1e-5
ALONE = ("--train-only", "parallel.launcher=inprocess", "parallel.strategy=single", "tracking.log_model=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("coming-from")
    for name, text in FILES.items():
        (made / name).write_text(text + "\n")
    return made


def theirs(folder: Path, name: str, *arguments: str, first_epoch: int = 0) -> list[float]:
    losses = folder / f"{name}.json"
    script = ROOT / "tests" / "support" / "theirs.py"
    program = [sys.executable, script, f"{name}.yaml", losses, str(first_epoch), f"{name}.py", *arguments]
    ended = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[float] = json.loads(losses.read_text())
    return found


def ours(folder: Path, name: str, *arguments: str) -> list[float]:
    command = [sys.executable, "-m", "pipeline", "run", f"{name}.yaml", *ALONE, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = (folder / "runs").glob(f"*-{name}-*")
    losses: dict[int, float] = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = event_from_json(line)
        points = event.points if isinstance(event, Metrics) else ()
        losses |= {point.step: point.value for point in points if point.name == "train/loss"}
    return [losses[step] for step in sorted(losses)]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "resumed"])
def test_both_have_the_same_loss_in_each_step(folder: Path, name: str) -> None:
    pytest.importorskip(PROGRAMS[name])
    if name == "topics":
        example_sentences(str(folder / "tiny-encoder"), steps=1)
    before = theirs(folder, name)
    if name == "duel":  # a loss for each of two optimizers
        before = [critic + generator for critic, generator in zip(before[::2], before[1::2], strict=True)]
    assert len(before) == STEPS[name]
    assert len(set(before)) == STEPS[name]
    assert ours(folder, name) == pytest.approx(before, rel=0, abs=TOLERANCE)


def test_both_continue_a_training(folder: Path) -> None:
    pytest.importorskip("accelerate")
    before = theirs(folder, "resumed", "2") + theirs(folder, "resumed", "4", first_epoch=2)
    ours(folder, "resumed")
    (run,) = (folder / "runs").glob("*-resumed-*")
    assert len(before) == 4 * 23
    assert ours(folder, "resumed", "train.epochs=4", "--resume", run.name) == pytest.approx(before, abs=TOLERANCE)


def test_the_page_counts_the_lines() -> None:
    def count(name: str) -> int:
        return sum(bool(line.strip()) for line in FILES[name].splitlines())

    assert [int(before) for before, _ in ROWS] == [count(f"{name}.py") for name in PROGRAMS]
    own = [[count(file) for file in (f"{name}.yaml", f"{name}_task.py") if file in FILES] for name in PROGRAMS]
    assert [[int(part) for part in after.split("+")] for _, after in ROWS] == own
