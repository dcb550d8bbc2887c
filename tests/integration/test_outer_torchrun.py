"""The command as one of the processes that an outer torchrun starts trains the same, and speaks once."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.protocol.events import AnyEvent, Metrics
from pipeline.recording import journal

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
EXACT, ROUNDED = 1e-12, 1e-5
"""In fp64 rounding stays far below the first; in fp32 below the second for an epoch, after which it grows."""

Curves = dict[str, dict[int, float]]


def curves(events: Iterable[AnyEvent]) -> Curves:
    """Losses and validation metrics by step."""
    found: Curves = {}
    for event in events:
        for point in event.points if isinstance(event, Metrics) else ():
            if point.name == "train/loss" or point.name.startswith("validation/"):
                found.setdefault(point.name, {})[point.step] = point.value
    return found


def assert_same(one: Curves, other: Curves, *, tolerance: float) -> None:
    assert one.keys() == other.keys() == {"train/loss", "validation/loss", "validation/accuracy"}
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def expected(launched: Callable[[str], Any]) -> Curves:
    return curves(launched("inprocess").events["fp64"])


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command itself as one of two processes that ``torchrun`` has started."""
    folder = tmp_path_factory.mktemp("torchrun")
    overrides = ["parallel.launcher=torchrun", "train.precision=fp64", "train.epochs=2", "tracking.log_model=false"]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    line += ["-m", "pipeline", "run", str(MLP), "--no-baseline", *overrides]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    return done, folder


def test_a_run_inside_torchrun_is_the_same(
    under_torchrun: tuple[subprocess.CompletedProcess[str], Path], expected: Curves
) -> None:
    done, folder = under_torchrun

    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    assert_same(curves(journal.read(run / journal.FILE_NAME)), expected, tolerance=EXACT)


def test_a_run_inside_torchrun_speaks_once(
    under_torchrun: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = under_torchrun

    assert done.stdout.count("starting 2 workers") == 1
    assert done.stdout.count("\nrun ") == 1
