"""Results of ``pipeline run``: fixed measurements in, the text of ``screens/NAME.txt`` out.

``UPDATE_SCREENS=1`` writes these files again, so that a change of a screen is seen in review.
"""

# promise: the screens at the end of commands, and whole reports: 24 lines, 80 columns

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from samples import HARDWARE, in_turn, spread, trial

from pipeline.experiment.schema import Parallel
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import StepParts, TrialResult
from pipeline.results.goodput import Goodput
from pipeline.results.measured import result_of_quick, result_of_run
from pipeline.results.record import Result
from pipeline.results.speedup import measure_rows
from pipeline.results.terminal import format_full, format_screen

FOLDER = "runs/20261125-211028-resnet-digits-3c35"
PLACES = (("Report", f"{FOLDER}/report.html"), ("More", "pipeline show latest --full    MLflow: pipeline ui"))
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
    "run_quick": quick,
}


def check(name: str, text: str) -> None:
    """Compare a text with its file."""
    path = Path(__file__).parent / "screens" / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text()


def shown(made: Result) -> str:
    lines = format_screen(made)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_has_this_text(name: str) -> None:
    check(name, shown(SCREENS[name]()))


def test_a_whole_result_has_this_text() -> None:
    made = resnet(goodput=Goodput(seconds={"steps": 200.4, "start": 33.4, "input": 33.4, "saving": 32.8}))
    lines = format_full(made)
    assert max(map(len, lines)) <= 80
    check("run_full", "\n".join([*lines, ""]))
