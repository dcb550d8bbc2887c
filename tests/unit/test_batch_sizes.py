"""Batch sizes of a benchmark: which are measured, what is too large, and what to write in the file."""

# promise: `benchmark --batch-sizes`: which sizes are tried, and what is recommended

import shlex
from typing import Any

import pytest
import samples
import toys
import yaml
from samples import HARDWARE, in_turn, spread

from pipeline.commands.benchmark.matrix import Cell, MatrixRequest, batch_cell, make_matrix
from pipeline.experiment.load import apply_overrides
from pipeline.experiment.schema import Experiment
from pipeline.plan.resources import Resources
from pipeline.report.advice import advise
from pipeline.report.numbers.row import Advice
from pipeline.report.report import Report
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places

SERVER = Resources(cpus=32, memory_mb=262144, node="server")
DDP = {"strategy": "ddp", "launcher": "torchrun", "workers": 2}


# Which sizes are measured


def cells(sizes: Any, **train: Any) -> tuple[Cell, ...]:
    experiment = toys.experiment(parallel=DDP, train={"global_batch_size": 16, **train})
    wanted = MatrixRequest(batch_sizes=sizes)
    return make_matrix(experiment, SERVER, allowed=("toys",), wanted=wanted).cells


def batches(made: tuple[Cell, ...]) -> dict[str, int]:
    return {cell.title: cell.trial.experiment.train.global_batch_size for cell in made if cell.trial}


def test_each_size_is_a_cell_of_the_declared_configuration() -> None:
    assert batches(cells((4, 8, 32))) == {
        "1 worker": 16, "ddp, 2 workers": 16, "ddp, 2 workers (batch 4)": 8, "ddp, 2 workers (batch 32)": 64
    }  # fmt: skip


def test_a_size_is_that_of_a_micro_batch_of_one_device() -> None:
    assert batches(cells((8,), gradient_accumulation=2))["ddp, 2 workers (batch 8)"] == 32


def test_a_batch_by_worker_makes_way() -> None:
    large = cells((8,), global_batch_size=None, batch_size_per_worker=4)[-1]
    assert large.trial is not None
    assert large.trial.experiment.train.global_batch_size == 16
    assert large.trial.experiment.train.batch_size_per_worker is None


def test_the_sizes_of_a_configuration_that_does_not_fit_have_its_reason() -> None:
    experiment = toys.experiment(parallel={**DDP, "workers": 64})
    made = make_matrix(experiment, SERVER, allowed=("toys",), wanted=MatrixRequest(batch_sizes=(4,))).cells
    assert made[-1].title == "ddp, 64 workers (batch 4)"
    assert "64 workers with 32 cores each need 2048 cores" in made[-1].reason


# What to write in the file


def advised(
    rates: dict[int, float], *, batch: int, split: int = 1, noise: float = 0.0, **train: Any
) -> tuple[Advice, ...]:
    """The measured advice, see `reported`."""
    report = reported(rates, batch=batch, split=split, noise=noise, **train)
    return tuple(one for one in report.advice if one.measured)


def reported(rates: dict[int, float], *, batch: int, split: int = 1, noise: float = 0.0, **train: Any) -> Report:
    """A report of two devices, with the throughput of each batch size per device; the file's may be missing."""
    tree = samples.trial("main", "main").experiment.model_dump(exclude_unset=True)
    tree["parallel"] = {"strategy": "ddp", "workers": 2, "launcher": "torchrun"}
    tree["train"] = {"epochs": 2, "global_batch_size": batch, "gradient_accumulation": split, **train}
    experiment = Experiment.model_validate(tree)
    own = samples.trial("ddp-2", "cell", strategy="ddp", workers=2)
    declared = Cell(name="ddp-2", strategy="ddp", workers=2, trial=_of(own, experiment))
    made = [batch_cell(declared, size) for size in rates]
    trials = [cell.trial.model_copy(update={"name": cell.name}) for cell in made if cell.trial]
    ends = [
        samples.finished(trial.name, spread(rate), batch=batch, slots=in_turn(rate, noise=noise * (size == max(rates))))
        for trial, (size, rate) in zip(trials, rates.items(), strict=True)
    ]
    report = Report.of(trials, ends, hardware=HARDWARE)
    return report.model_copy(update={"advice": advise(report, experiment=experiment, cores=2)})


def _of(trial: Any, experiment: Experiment) -> Any:
    return trial.model_copy(update={"experiment": experiment})


def overrides(advice: tuple[Advice, ...]) -> list[str]:
    return [word for one in advice for word in shlex.split(one.overrides)]


def test_the_right_size_is_left_alone() -> None:
    assert advised({16: 100, 32: 200, 64: 205}, batch=64) == ()


def test_a_larger_global_batch_comes_with_a_learning_rate() -> None:
    (advice,) = advised({8: 100, 16: 150, 32: 200}, batch=16)
    assert overrides((advice,)) == [
        "train.global_batch_size=64", "train.lr_scaling.rule=linear", "train.lr_scaling.base_batch_size=16"
    ]  # fmt: skip
    assert advice.reason == "2 workers (ddp, batch 32): 200 samples/s is faster; the file's 8 has 100"
    assert "check that the model trains as well" in advice.change


def test_the_screen_says_that_a_larger_global_batch_changes_the_training() -> None:
    def end(report: Report) -> str:
        return "\n".join(format_screen(report, Places(folder="runs/x", run="latest")))

    larger = end(reported({8: 100, 32: 200}, batch=16))
    assert "USE      train.global_batch_size=64" in larger
    assert "         This changes the training. Check that the model trains as well." in larger
    assert "changes the training" not in end(reported({8: 200, 30: 200}, batch=60))


def test_a_learning_rate_that_follows_already_is_left_alone() -> None:
    scaling = {"rule": "sqrt", "base_batch_size": 8}
    assert overrides(advised({8: 100, 32: 200}, batch=16, lr_scaling=scaling)) == ["train.global_batch_size=64"]


def test_noise_is_no_reason_to_change_the_training() -> None:
    assert advised({16: 100, 32: 200}, batch=32, noise=0.9) == ()  # 1.9 to the power of 1.09 is above 2
    assert advised({16: 100, 32: 200}, batch=32, noise=0.8)


def test_what_does_not_fit_or_is_larger_than_needed_is_accumulated() -> None:
    (advice,) = advised({16: 200}, batch=256)
    assert overrides((advice,)) == ["train.gradient_accumulation=8"]
    assert "the file's batch size per device, 128, could not be measured" in advice.reason
    assert "keeps the global batch size" in advice.change
    assert overrides(advised({8: 200, 30: 200}, batch=60)) == ["train.gradient_accumulation=4"]


def test_accumulation_that_is_not_needed_goes_first() -> None:
    assert overrides(advised({8: 100, 32: 200}, batch=64, split=4)) == ["train.gradient_accumulation=1"]
    assert overrides(advised({2: 100, 32: 200}, batch=16, split=4)) == [
        "train.gradient_accumulation=1", "train.global_batch_size=64",
        "train.lr_scaling.rule=linear", "train.lr_scaling.base_batch_size=16",
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [2, 5, 64, 100, 101])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("recommended", [1, 3, 32, 64])
def test_the_file_with_the_change_is_valid_and_needs_no_other(recommended: int, split: int, batch: int) -> None:
    if split > batch // 2:
        return
    rates = dict.fromkeys((1, 2, 3, 32, 64), 100.0) | {recommended: 200.0}
    advice = advised(rates, batch=batch, split=split)
    tree = yaml.safe_load(f"train: {{global_batch_size: {batch}, gradient_accumulation: {split}}}")
    assert not apply_overrides(overrides(advice), tree, {})
    train = tree["train"]
    size = -(-train["global_batch_size"] // (2 * train["gradient_accumulation"]))
    assert size <= max(recommended, -(-batch // (2 * (batch // 2))))
    assert size > recommended / 2
    assert train["global_batch_size"] == batch or size == recommended
