"""Results of ``pipeline run``: fixed measurements in, the text of ``screens/NAME.txt`` out."""

# promise: the screens at the end of commands, and whole reports: 24 lines, 80 columns

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import HARDWARE, in_turn, spread, trial
from screens import check, shown

from pipeline import RunResult
from pipeline.commands.run import estimate_training_s
from pipeline.experiment.schema import Parallel
from pipeline.protocol.events import Finished, Started
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import StepParts, TrialResult, Unsaved
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.results import record, speedup
from pipeline.results.goodput import Goodput
from pipeline.results.measured import result_of_quick, result_of_run
from pipeline.results.page import render
from pipeline.results.record import Fact, Result
from pipeline.results.speedup import measure_rows
from pipeline.results.terminal import format_full

FOLDER = "runs/20261125-211028-resnet-digits-3c35"
PLACES = (("Report", f"{FOLDER}/report.html"), ("More", "pipeline show 9eaf --full    MLflow: pipeline ui"))
COMMAND = "pipeline run experiments/resnet.yaml"
METRICS = {"train/loss": 0.01, "validation/loss": 0.02988, "validation/accuracy": 0.9944}
NORMS = ("BatchNorm2d",)
LOSSES = (2.31, 2.29, 2.27, 2.25)
EARLY, LATE = (2.31, 2.2831, 2.27, 2.25), (2.31, 2.29, 2.27, 2.189)


def declared(one: Trial) -> Trial:
    parallel = Parallel(strategy="ddp", workers=2)
    return one.model_copy(update={"experiment": one.experiment.model_copy(update={"parallel": parallel})})


BASELINE = declared(trial("baseline", "baseline", batch=128))
ALL_CORES = declared(trial("reference", "reference", cpus=2, batch=128))
MAIN = declared(trial("main", "main", strategy="ddp", workers=2, batch=128))


def end(
    name: str, rate: float, *, noise: float = 0.0, parts: tuple[float | None, ...] | None = None, start_s: float = 3.7,
    ranges: Mapping[str, tuple[float, float]] | None = None, **more: Any,
) -> Finished:  # fmt: skip
    """What a trial measured in alternating intervals; ``parts``: compute, exposed, data, rest."""
    step_ms = 1000 * 128 / rate
    compute, exposed, data, rest = parts or (None, None, 0.0, None)
    result = TrialResult(
        trial=name,
        whole_training=14_380,
        samples_per_second=spread(rate),
        step_ms=spread(step_ms, noise=0.05 * step_ms),
        parts=StepParts(
            held_ms=spread(step_ms), compute_ms=compute, exposed_communication_ms=exposed, data_wait_ms=data,
            rest_ms=rest, nodes=("node-1",), ranges=ranges or {},
        ),
        **{"steps": 120, "epochs": 10, "slots": in_turn(rate, noise=noise), "peak_memory_mb": (781.0,), **more},
        gradient_mb=2.8,
    )  # fmt: skip
    return Finished(time=0.0, trial=name, result=result, time_to_first_step_s=start_s)


def result(*ends: Finished, trials: tuple[Trial, ...] = (MAIN, BASELINE, ALL_CORES), **more: Any) -> Result:
    rows = measure_rows(trials, ends)
    made = result_of_run(rows, hardware=HARDWARE, **{"command": COMMAND, "cores": 2, **more})
    return made.model_copy(update={"places": PLACES})


def resnet(
    *, noise: float = 0.04, rate: float = 606, losses: tuple[float, ...] = EARLY, parts: Any = None,
    command: str = COMMAND, goodput: Goodput | None = None, **more: Any,
) -> Result:  # fmt: skip
    """ddp with two workers next to one worker and one process on both cores."""
    main = {"slots_s": 30.0, "coupling": NORMS, **more}
    return result(
        end("baseline", 329, losses=LOSSES),
        end("reference", 564, noise=-min(noise, 0.15) / 2, losses=LATE),
        end("main", rate, noise=noise, parts=parts or (120_530 / rate, 8.8, 0.3, 0.9), losses=losses, metrics=METRICS,
            **main),
        command=command, goodput=goodput,
    )  # fmt: skip


def mlp(*, rest: float = 0.9, exposed: float = 3.4) -> Result:
    """ddp with two workers, four times slower than one worker, on a machine that is busy with other work."""
    return result(
        end("baseline", 56_131, losses=LOSSES, start_s=0.5),
        end("reference", 1_036, noise=2.0, losses=LOSSES, start_s=0.5),
        end("main", 14_088, noise=0.28, parts=(4.1, exposed, 0.1, rest), losses=LOSSES, metrics=METRICS,
            other_cores=1.4, slots_s=30.0, start_s=1.4),
    )  # fmt: skip


def loading() -> Result:
    """A training that waits for its data, without one process on both cores."""
    parts = (160.0, 8.8, 40.0, 0.9)
    return result(
        end("baseline", 329, losses=LOSSES),
        end("main", 606, noise=0.04, parts=parts, losses=LOSSES, metrics=METRICS, slots_s=30.0),
        trials=(MAIN, BASELINE),
    )


def alone(**more: Any) -> Result:
    """A training without any measurement."""
    return result(end("main", 362, slots=(), metrics=METRICS), trials=(MAIN,), **more)


def one_device() -> Result:
    """DataParallel with a single replica, which has no speedup."""
    main = trial("main", "main", strategy="dp", batch=128)
    ends = [end("baseline", 353, losses=LOSSES), end("main", 351, losses=LOSSES, metrics=METRICS)]
    return result(*ends, trials=(main, BASELINE))


def noisy_parts() -> Result:
    """Parts that were disturbed by other work, so that they do not add up to the step."""
    ranges = {"compute_ms": (5.4, 14.2), "exposed_communication_ms": (0.0, 6.1), "rest_ms": (0.0, 5.0)}
    return resnet(rate=12_300, parts=(11.9, 2.4, 0.3, 2.8), ranges=ranges, losses=LOSSES)


def quick() -> Result:
    main = MAIN.model_copy(update={"is_quick": True, "launcher": "ray"})
    (row,) = measure_rows((main,), [end("main", 362, slots=(), metrics=METRICS, steps=8)])
    made = result_of_quick(row, hardware=HARDWARE, command=f"{COMMAND} --quick", training_s=95)
    return made.model_copy(update={"places": (("Folder", FOLDER),)})


SCREENS: dict[str, Callable[[], Result]] = {
    "run_faster": resnet,
    "run_inconclusive": lambda: resnet(rate=349, noise=0.15, other_cores=1.4),
    "run_too_noisy": lambda: resnet(rate=349, noise=80.0, other_cores=1.4),
    "run_too_close": lambda: resnet(rate=330, noise=0.02, losses=LOSSES),
    "run_slower": mlp,
    "run_slow_optimizer": lambda: mlp(rest=3.9, exposed=0.4),
    "run_noisy_parts": noisy_parts,
    "run_suggestion": loading,
    "run_other_loss": lambda: resnet(coupling=()),
    "run_one_device": one_device,
    "run_train_only": lambda: alone(option="--train-only"),
    "run_interrupted": lambda: alone(missing="interrupted"),
    "run_no_baseline": lambda: alone(missing="no baseline"),
    "run_quick": quick,
}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_has_this_text(name: str) -> None:
    check(name, shown(SCREENS[name]()))


def test_a_whole_result_has_this_text() -> None:
    made = resnet(goodput=Goodput(seconds={"steps": 200.4, "start": 33.4, "input": 33.4, "saving": 32.8}))
    lines = format_full(made)
    assert max(map(len, lines)) <= 80
    check("run_full", "\n".join([*lines, ""]))


def test_the_answer_in_a_line_is_that_of_the_screen() -> None:
    assert {name: make().verdict for name, make in SCREENS.items()} == {
        "run_faster": "2 workers (ddp): 1.84x as fast as 1 worker (95% CI 1.76x to 1.92x)",
        "run_inconclusive": "2 workers (ddp): inconclusive, 0.91x to 1.24x (95% CI)",
        "run_too_noisy": "2 workers (ddp): inconclusive, too noisy to measure",
        "run_too_close": "2 workers (ddp): inconclusive, 0.98x to 1.03x (95% CI)",
        "run_slower": "2 workers (ddp): 3.98x slower than 1 worker (95% CI 3.04x to 5.22x)",
        "run_slow_optimizer": "2 workers (ddp): 3.98x slower than 1 worker (95% CI 3.04x to 5.22x)",
        "run_noisy_parts": "2 workers (ddp): 37.4x as fast as 1 worker (95% CI 35.8x to 39.0x)",
        "run_suggestion": "2 workers (ddp): 1.84x as fast as 1 worker (95% CI 1.76x to 1.92x)",
        "run_other_loss": "2 workers (ddp): speedup not valid, loss differs from the baseline",
        "run_one_device": "1 worker (dp): validation/accuracy 0.9944; speedup not measured",
        "run_train_only": "2 workers (ddp): validation/accuracy 0.9944; speedup not measured",
        "run_interrupted": "2 workers (ddp): validation/accuracy 0.9944; speedup not measured",
        "run_no_baseline": "2 workers (ddp): validation/accuracy 0.9944; speedup not measured",
        "run_quick": "2 workers (ddp): quick test passed; the whole training takes about 1 min 35 s",
    }


def test_a_new_number_is_shown_everywhere_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def iter_more(row: speedup.Row, **more: Any) -> Iterator[Fact]:
        yield from known(row, **more)
        yield Fact(key="pressure", value=1013.25, label="air pressure", trial=row.key)

    known = speedup.iter_facts
    monkeypatch.setattr(speedup, "iter_facts", iter_more)
    made = resnet()
    again = Result.model_validate_json(made.model_dump_json())
    ran = RunResult(again, Path("runs/x"), None, None)
    assert again == made
    assert any(line.split() == ["air", "pressure", "1,013"] for line in format_full(made))
    assert "<dt>air pressure</dt><dd>1,013</dd>" in render(made, about={})
    assert {name: own["pressure"] for name, own in record.mlflow_metrics(made).items()} == dict.fromkeys(
        ("main", "baseline", "reference"), 1013.25
    )
    assert ran.to_pandas().loc["baseline", "pressure"] == 1013.25


def test_a_command_that_confirms_another_loss_sets_no_key_twice() -> None:
    text = shown(resnet(coupling=(), command="pipeline run a.yaml train.epochs=2 'model.hidden=[64, 64]'"))
    (line,) = (line for line in text.splitlines() if line.startswith("CONFIRM"))
    assert line.endswith("pipeline run a.yaml 'model.hidden=[64, 64]' train.precision=fp64 \\")


def test_a_row_that_trains_another_model_has_a_note_and_is_not_advised() -> None:
    text = shown(
        result(
            end("baseline", 329, losses=LOSSES),
            end("reference", 900, losses=EARLY, coupling=NORMS),
            end("main", 606, losses=LOSSES, slots_s=30.0),
        )
    )
    assert text.count("[1]") == 2
    assert "ignore the speedup" in text
    assert "USE" not in text


def test_windows_have_no_confidence_interval() -> None:
    made = result(*(end(name, rate, slots=()) for name, rate in (("baseline", 329), ("reference", 564), ("main", 606))))
    said = "2 workers were measured 1.07x as fast as 1 process on both cores, without a confidence interval."
    assert said in made.notes
    assert made.headline[1] == "Measured 1.84x as fast, without a confidence interval"
    assert not any("95% CI" in note for note in made.notes)


def test_an_interval_that_excludes_one_is_not_rounded_to_one() -> None:
    main = end("main", 1005, noise=0.002, losses=LOSSES, slots_s=30.0)
    made = result(end("baseline", 1000, losses=LOSSES), main, trials=(MAIN, BASELINE))
    assert made.headline[1].startswith("(95% confidence interval 1.003x to 1.01x")


def test_losses_that_are_not_finite_differ_by_no_number() -> None:
    text = shown(resnet(losses=(float("nan"),) * 4))
    assert "not finite" in text
    assert "inf" not in text.replace("infinite", "")


def test_a_screen_with_much_to_say_fits() -> None:
    unsaved = Unsaved(newest=96, failed=2, reason="the disk is full")
    stopped = "validation/loss has not improved for 3 epochs"
    more = {"stopped_early": stopped, "unsaved": unsaved, "data_notes": ("the stream is not shuffled",)}
    text = shown(resnet(losses=LATE, rate=330, noise=0.02, **more))
    assert "2 checkpoints could not be saved: the disk is full." in text
    assert "training stopped early" in text
    assert resnet(**more).verdict.endswith("The latest checkpoint is from step 96, but the training ended at step 120")


def test_notes_say_nothing_twice() -> None:
    for make in SCREENS.values():
        made = make()
        said = [*made.headline, *made.notes, *(text for _, text in made.next), *(one.reason for one in made.advice)]
        assert len(said) == len(set(said))


@pytest.mark.parametrize(
    ("train", "seconds"),
    [({"epochs": 10}, 3.0 + 10 * 23 * 0.1 + 10 * 0.5), ({"steps": 7}, 3.0 + 7 * 0.1 + 0.5),
     ({"epochs": 10, "minutes": 0.1}, 3.0 + 6 + 3 * 0.5)],
)  # fmt: skip
def test_a_quick_test_counts_the_steps_and_the_evaluations_of_the_whole_training(
    train: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    own = MAIN.experiment.train.model_copy(update={"epochs": None, **train})
    main = MAIN.model_copy(update={"experiment": MAIN.experiment.model_copy(update={"train": own})})
    (row,) = measure_rows((main,), [end("main", 1280, slots=(), start_s=3.0)])
    started = Started(
        total_steps=8, steps_per_epoch=23, epochs=1, train_samples=1437, epoch_samples=1437, validation_samples=360,
        parameters=1, devices=("cpu",), data_name="digits", data_digest="",
    )  # fmt: skip
    with closing(Journal(tmp_path / FILE_NAME)) as journal:
        journal.append(started)
    invocation = SimpleNamespace(folder=tmp_path, goodput=Goodput(seconds={"steps": 0.8, "evaluation": 0.5}))
    assert estimate_training_s(row, invocation) == pytest.approx(seconds)  # type: ignore[arg-type]
