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
from pipeline.report.numbers.goodput import Goodput
from pipeline.report.report import Report
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places

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
METRICS = {"train/loss": 0.01, "validation/loss": 0.02988, "validation/accuracy": 0.9944}
NORMS = ("BatchNorm2d",)
LOSSES = (2.31, 2.29, 2.27, 2.25)
EARLY, LATE = (2.31, 2.2831, 2.27, 2.25), (2.31, 2.29, 2.27, 2.189)


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


def resnet(*, noise: float = 0.04, rate: float = 606, losses: tuple[float, ...] = EARLY, **more: Any) -> Report:
    """ddp with two workers next to one worker and one process on both cores."""
    ends = [
        end("baseline", 329, losses=LOSSES),
        end("reference", 564, noise=-noise / 2, losses=LATE),
        end("main", rate, noise=noise, parts=(120_530 / rate, 8.8, 0.3, 0.9), losses=losses, metrics=METRICS,
            **{"slots_s": 30.0, "coupling": NORMS, **more}),
    ]  # fmt: skip
    return Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)


def mlp() -> Report:
    """ddp with two workers, four times slower than one worker, on a machine that is busy with other work."""
    ends = [
        end("baseline", 56_131, losses=LOSSES, start_s=0.5),
        end("reference", 1_036, noise=2.0, losses=LOSSES, start_s=0.5),
        end("main", 14_088, noise=0.28, parts=(4.1, 3.4, 0.1, 0.9), losses=LOSSES, metrics=METRICS, other_cores=1.4,
            slots_s=30.0, start_s=1.4),
    ]  # fmt: skip
    return advised(Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE))


def advised(report: Report) -> Report:
    parallel = Parallel(strategy="ddp", workers=2)
    train = MAIN.experiment.train.model_copy(update={"global_batch_size": report.rows[0].global_batch_size})
    experiment = MAIN.experiment.model_copy(update={"parallel": parallel, "train": train})
    return report.model_copy(update={"advice": advise(report, experiment=experiment, cores=2)})


def loading() -> Report:
    """A training that waits for its data, without one process on both cores."""
    ends = [
        end("baseline", 329, losses=LOSSES),
        end("main", 606, noise=0.04, parts=(160.0, 8.8, 40.0, 0.9), losses=LOSSES, metrics=METRICS, slots_s=30.0),
    ]
    return advised(Report.of([MAIN, BASELINE], ends, hardware=HARDWARE))


def alone(**options: bool) -> Report:
    """A training without any measurement."""
    only = MAIN.model_copy(update={"train_only": True, "launcher": "ray", **options})
    return Report.of([only], [end("main", 362, slots=(), metrics=METRICS)], hardware=HARDWARE)


def dp_on_one_device() -> Report:
    """DataParallel with a single replica, which has no speedup."""
    main = trial("main", "main", strategy="dp", batch=128)
    ends = [end("baseline", 353, losses=LOSSES), end("main", 351, losses=LOSSES, metrics=METRICS)]
    return advised(Report.of([main, BASELINE], ends, hardware=HARDWARE))


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
    "run_faster": resnet,
    "run_inconclusive": lambda: resnet(rate=349, noise=0.15, other_cores=1.4),
    "run_too_close": lambda: resnet(rate=330, noise=0.02, losses=LOSSES),
    "run_slower": mlp,
    "run_suggestion": loading,
    "run_other_loss": lambda: resnet(coupling=()),
    "run_one_device": dp_on_one_device,
    "run_train_only": alone,
    "run_quick": lambda: alone(is_quick=True),
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
    command = {"run_quick": "pipeline run experiments/resnet.yaml --quick", "compare": "pipeline benchmark resnet.yaml"}
    text = shown(SCREENS[name](), PLACES._replace(command=command.get(name, PLACES.command)))
    check(name, text)


@pytest.mark.parametrize("name", ["run_full", "compare_full"])
def test_a_whole_report_has_this_text(name: str) -> None:
    """The tables fit 80 columns."""
    report = advised(samples.report() if name == "run_full" else samples.comparison())
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


def test_a_command_that_confirms_another_loss_sets_no_key_twice() -> None:
    command = "pipeline run a.yaml train.epochs=2 'model.hidden=[64, 64]'"
    text = shown(resnet(coupling=()), PLACES._replace(command=command))
    (line,) = (line for line in text.splitlines() if line.startswith("CONFIRM"))
    assert line.endswith("pipeline run a.yaml 'model.hidden=[64, 64]' train.precision=fp64 \\")


def test_the_result_in_a_line_is_that_of_the_screen() -> None:
    sentences = {name: getattr(make(), "verdict", "") for name, make in SCREENS.items()}
    assert sentences == {
        "run_faster": "2 workers (ddp): 1.84x as fast as 1 worker (95% CI 1.76x to 1.92x)",
        "run_inconclusive": "2 workers (ddp): inconclusive, 0.91x to 1.24x (95% CI)",
        "run_too_close": "2 workers (ddp): inconclusive, 0.98x to 1.03x (95% CI)",
        "run_slower": "2 workers (ddp): 4.0x slower than 1 worker (95% CI 3.0x to 5.2x)",
        "run_suggestion": "2 workers (ddp): 1.84x as fast as 1 worker (95% CI 1.76x to 1.92x)",
        "run_other_loss": "2 workers (ddp): speedup not valid, loss differs from the baseline",
        "run_one_device": "1 worker (dp): validation/accuracy 0.9944; speedup not measured",
        "run_train_only": "2 workers (ddp): validation/accuracy 0.9944; speedup not measured",
        "run_quick": "2 workers (ddp): quick test passed (2 steps); speedup not measured",
        "compare": "2 workers (ddp): 1.62x to 12.9x slower than 1 worker (95% CI)",
        "evaluate": "test/loss 0.17, test/accuracy 0.95, test/confusion (9 values): test set, step 120",
    }


def test_a_row_that_trains_another_model_has_a_note_and_is_not_advised() -> None:
    """The main row is valid, so the screen says nothing else about the loss of the reference."""
    ends = [
        end("baseline", 329, losses=LOSSES),
        end("reference", 900, losses=EARLY, coupling=NORMS),
        end("main", 606, losses=LOSSES, slots_s=30.0),
    ]
    text = shown(advised(Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)))
    assert "see above" not in text
    assert text.count("[1]") == 2
    assert "ignore the speedup" in text
    assert "USE" not in text


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


def test_windows_have_no_confidence_interval() -> None:
    ends = [end(name, rate, slots=()) for name, rate in (("baseline", 329), ("reference", 564), ("main", 606))]
    report = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)
    assert "2 workers were measured 1.07x as fast as 1 process on both cores, without a confidence interval." in (
        shown(report).replace("\n", " ")
    )
    assert not any("95% CI" in remark for remark in report.remarks)


def test_an_interval_that_excludes_one_is_not_rounded_to_one() -> None:
    ends = [
        end("baseline", 1000, losses=LOSSES),
        end("main", 1005, noise=0.002, losses=LOSSES, slots_s=30.0),
    ]
    text = shown(Report.of([MAIN, BASELINE], ends, hardware=HARDWARE))
    assert "1.003x to 1.01x" in text
    assert "1.00x" not in text


def test_losses_that_are_not_finite_differ_by_no_number() -> None:
    text = shown(resnet(losses=(float("nan"),) * 4))
    assert "NaN or infinite" in text
    assert "up to inf" not in text


def test_a_screen_with_many_notes_fits() -> None:
    """A run that ended early, with another loss in each row."""
    report = resnet(losses=LATE, rate=330, noise=0.02, stopped_early="validation/loss has not improved for 3 epochs")
    reference = report.rows[1].model_copy(update={"first_loss_difference": 0.1, "largest_loss_difference": 0.1})
    rows = (report.rows[0], reference, *report.rows[2:])
    notes = ("2 checkpoints could not be saved: the disk is full.",)
    text = shown(report.model_copy(update={"rows": rows, "training_notes": notes}))
    assert "[2]" in text
