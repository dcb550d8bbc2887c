"""The screens that commands end with: fixed results in, the text of ``screens/NAME.txt`` out.

``UPDATE_SCREENS=1`` writes these files again, so that a change of a screen is seen in review.
"""

# promise: the screens at the end of commands, and whole reports: 24 lines, 80 columns

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
import samples
from samples import HARDWARE, in_turn, spread, trial

from pipeline.experiment.schema import Parallel
from pipeline.protocol.events import Finished
from pipeline.protocol.trial_result import StepParts, TrialResult
from pipeline.record.screen import print_report
from pipeline.report.advice import advise
from pipeline.report.evaluated import EvaluationReport
from pipeline.report.report import Report
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places
from pipeline.results.goodput import Goodput

FOLDER = "runs/20261125-211028-resnet-digits-3c35"
PLACES = Places(
    folder=FOLDER,
    run="latest",
    page=f"{FOLDER}/report.html",
    mlflow="pipeline ui",
    command="pipeline run experiments/resnet.yaml",
)
BASELINE = trial("baseline", "baseline", batch=128)
ALL_CORES = trial("reference", "reference", cpus=2, batch=128)
MAIN = trial("main", "main", strategy="ddp", workers=2, batch=128)
LOSSES = (2.31, 2.29, 2.27, 2.25)
EARLY = (2.31, 2.2831, 2.27, 2.25)


def end(
    name: str, rate: float, *, noise: float = 0.0, parts: tuple[float | None, ...] | None = None, start_s: float = 3.7,
    **more: Any,
) -> Finished:  # fmt: skip
    """What a trial measured in alternating intervals; ``parts``: compute, exposed, data, rest."""
    step_ms = 1000 * 128 / rate
    compute, exposed, data, rest = parts or (None, None, 0.0, None)
    result = TrialResult(
        trial=name,
        steps=120,
        epochs=10,
        whole_training=14_380,
        samples_per_second=spread(rate),
        step_ms=spread(step_ms, noise=0.05 * step_ms),
        parts=StepParts(
            held_ms=spread(step_ms), compute_ms=compute, exposed_communication_ms=exposed, data_wait_ms=data,
            rest_ms=rest, nodes=("node-1",),
        ),
        **{"slots": in_turn(rate, noise=noise), "peak_memory_mb": (781.0,), "gradient_mb": 2.8, **more},
    )  # fmt: skip
    return Finished(time=0.0, trial=name, result=result, time_to_first_step_s=start_s)


def advised(report: Report) -> Report:
    parallel = Parallel(strategy="ddp", workers=2)
    train = MAIN.experiment.train.model_copy(update={"global_batch_size": report.rows[0].global_batch_size})
    experiment = MAIN.experiment.model_copy(update={"parallel": parallel, "train": train})
    return report.model_copy(update={"advice": advise(report, experiment=experiment, cores=2)})


def comparison() -> Report:
    """Three repeats of one worker, of both cores and of two workers, on a busy machine."""
    rates = {
        "baseline": (96_000, 97_000, 98_000), "ddp-2": (16_000, 20_000, 30_000), "reference": (10_000, 20_000, 40_000)
    }  # fmt: skip
    parts = {
        "baseline": (0.9, None, 0.06, 0.26), "ddp-2": (2.6, 3.0, 0.08, 0.0), "reference": (9.0, None, 0.1, 1.5)
    }  # fmt: skip
    ends = [
        end(name, rate, slots=(), repeat=repeat, parts=parts[name], losses=LOSSES)
        for name, each in rates.items()
        for repeat, rate in enumerate(each)
    ]
    cell = trial("ddp-2", "cell", strategy="ddp", workers=2, batch=128)
    return advised(Report.of([BASELINE, cell, ALL_CORES], ends, hardware=HARDWARE))


def evaluation(*, classes: int = 3) -> EvaluationReport:
    matrix = {
        f"test/confusion_true_{true}_predicted_{other}": 30.0 * (true == other) + 1
        for true in range(classes)
        for other in range(classes)
    }
    return EvaluationReport(
        name="resnet-digits", run="latest", checkpoint="c", step=120, epoch=10, best="validation/loss", split="test",
        samples=360, strategy="ddp", workers=2, changes=(), summary="test set, step 120", is_fallback=False,
        values={"test/loss": 0.17, "test/accuracy": 0.95, **matrix},
    )  # fmt: skip


SCREENS: dict[str, Callable[[], object]] = {
    "compare": comparison,
    "evaluate": evaluation,
}


def check(name: str, text: str) -> None:
    """Compare a text with its file."""
    path = Path(__file__).parent / "screens" / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_has_this_text(name: str) -> None:
    command = {"compare": "pipeline benchmark resnet.yaml"}
    text = shown(SCREENS[name](), PLACES._replace(command=command.get(name, PLACES.command)))
    check(name, text)


@pytest.mark.parametrize("name", ["compare_full"])
def test_a_whole_report_has_this_text(name: str) -> None:
    """The tables fit 80 columns."""
    report = advised(samples.comparison())
    spent = Goodput(seconds={"steps": 200.4, "start": 33.4, "input": 33.4, "saving": 32.8})
    stdout = rich.console.Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    print_report(report.model_copy(update={"goodput": spent}), stdout=stdout)
    assert isinstance(stdout.file, io.StringIO)
    lines = [line.rstrip() for line in stdout.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    check(name, "\n".join([*lines, ""]))


def shown(report: object, places: Places = PLACES) -> str:
    lines = format_screen(report, places)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return "\n".join([*lines, ""])


def test_a_screen_has_room_for_ten_rows_and_says_what_is_left_out() -> None:
    cells = [trial(f"fsdp-{n}", "cell", strategy="fsdp", workers=n, batch=128) for n in range(2, 30)]
    named = [cell.model_copy(update={"variant": "activation_checkpointing, mixed"}) for cell in cells]
    ends = [end(each.name, 1e7, slots=(), losses=LOSSES, parts=(1.0, 0.1, 0.1, 0.1)) for each in (BASELINE, *named)]
    text = shown(Report.of([BASELINE, *named], ends, hardware=HARDWARE))
    assert "23 more rows: pipeline show latest --full" in text
    assert "29 workers (fsdp," in text  # the result is about it
    assert "test/confusion has 400 values: see pipeline evaluate --json." in shown(evaluation(classes=20))


def test_the_result_in_a_line_is_that_of_the_screen() -> None:
    sentences = {name: getattr(make(), "verdict", "") for name, make in SCREENS.items()}
    assert sentences == {
        "compare": "2 workers (ddp): 1.62x to 12.9x slower than 1 worker (95% CI)",
        "evaluate": "test/loss 0.17, test/accuracy 0.95, test/confusion (9 values): test set, step 120",
    }


def test_the_fastest_row_is_not_named_if_it_trains_another_model() -> None:
    cell = trial("ddp-2", "cell", strategy="ddp", workers=2, batch=128)
    ends = [
        end(name, rate, slots=(), repeat=repeat, losses=losses)
        for name, rate, losses in (("baseline", 329, LOSSES), ("ddp-2", 606, EARLY))
        for repeat in range(3)
    ]
    text = shown(Report.of([BASELINE, cell], ends, hardware=HARDWARE))
    assert "speedup not" in text
    assert "Fastest" not in text
