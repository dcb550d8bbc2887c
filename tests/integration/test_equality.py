"""The same experiment trains the same model, whoever starts its workers and however many there are."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline import registry
from pipeline.events import AnyEvent, Metrics
from pipeline.recording import journal

pytestmark = pytest.mark.slow

MLP = Path(__file__).parents[2] / "experiments" / "mlp.yaml"
LAUNCHERS = registry.names("launchers")
MANY = [name for name in LAUNCHERS if registry.load("launchers", name).Launcher.many_processes]
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


def test_the_reference_trains(expected: Curves) -> None:
    """Equal curves would mean little if they were flat."""
    losses = expected["train/loss"]

    assert list(losses) == list(range(1, 47))
    assert losses[46] < losses[1] / 2
    assert list(expected["validation/accuracy"]) == [23, 46]


@pytest.mark.parametrize("launcher", MANY)
def test_fp64_is_the_same_everywhere(launched: Callable[[str], Any], expected: Curves, launcher: str) -> None:
    """Two workers and one."""
    assert_same(curves(launched(launcher).events["fp64"]), expected, tolerance=EXACT)


@pytest.mark.parametrize("launcher", MANY)
def test_fp32_is_the_same_to_rounding_in_the_first_epoch(launched: Callable[[str], Any], launcher: str) -> None:
    one = curves(launched("inprocess").events["fp32"])

    assert_same(curves(launched(launcher).events["fp32"]), one, tolerance=ROUNDED)


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
