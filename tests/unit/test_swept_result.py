"""The result that a sweep ends in: its screen, its answer in a line, its page, and the commands to go on with."""

# promise: the screens at the end of commands, and whole reports: 24 lines, 80 columns

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samples import HARDWARE
from screens import check, shown

from pipeline.commands.sweep import make_result
from pipeline.commands.sweep_trial import State, SweptTrial
from pipeline.experiment.load import load
from pipeline.results import record
from pipeline.results.page import render
from pipeline.results.record import Result

ROOT = Path(__file__).parents[2]
RUN = "20261125-211028-mlp-sweep-sweep-3c35"
PLACES = (
    ("Report", f"runs/{RUN}/report.html"),
    ("More", "pipeline show 9eaf --full    MLflow: pipeline ui"),
)
TRIALS: list[tuple[float, float, list[int], State, float | None, int]] = [
    (0.03714, 0.8951, [128, 128], "completed", 0.03459, 27),
    (0.008046, 0.7167, [128, 128], "completed", 0.1339, 27),
    (0.004961, 0.9471, [32], "stopped early", 2.005, 1),
    (0.09072, 0.7656, [64, 64], "completed", 0.02532, 27),
]


def result(
    monkeypatch: pytest.MonkeyPatch, trials: Any = TRIALS, *overrides: str, message: str = "", logs_model: bool = True
) -> Result:
    monkeypatch.chdir(ROOT)
    file = load("experiments/sweep.yaml", [f"sweep.trials={len(trials)}", *overrides])
    keys = ("optimizer.lr", "optimizer.momentum", "model.hidden")
    made = [
        SweptTrial(number, dict(zip(keys, values, strict=True)), state, message, value, epochs)
        for number, (*values, state, value, epochs) in enumerate(trials, start=1)
    ]

    class Plan:
        sweep, direction = file.experiment.sweep, "min"

    invocation: Any = SimpleNamespace(file=file, hardware=HARDWARE, folder=Path("runs") / RUN)
    found = make_result(made, Plan, invocation, logs_model=logs_model)  # type: ignore[arg-type]
    return found.model_copy(update={"run": RUN, "places": PLACES})


def test_the_screen_has_this_text(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(monkeypatch)
    check("sweep", shown(found))
    assert found.verdict == (
        "Best: trial 4 of 4, validation/loss 0.02532 (lr=0.09072, momentum=0.7656, hidden=[64, 64])"
    )


def test_a_sweep_that_was_interrupted_names_what_failed_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = [(0.1, 0.5, [32], "failed", None, 0), (0.2, 0.5, [32], "not started", None, 0)]
    found = result(monkeypatch, [TRIALS[0], *left], message="rank 0: out of memory", logs_model=False)
    check("sweep_left", shown(found))


def test_of_many_trials_the_best_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(result(monkeypatch, TRIALS * 7))
    assert "pipeline show 9eaf --full" in text
    assert "4              0.02532" in text


def test_without_a_best_trial_it_says_why_and_is_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    nan: list[Any] = [(0.1, 0.5, [32], "completed", math.nan, 2)]
    found = result(monkeypatch, nan)
    assert found.headline == ("validation/loss is NaN in all completed trials, so there is no best trial",)
    json.loads(found.model_dump_json(), parse_constant=pytest.fail)
    assert [name for name, _ in found.next] == []
    assert result(monkeypatch, TRIALS[2:3]).headline == ("No trial completed, so there is no best trial",)


def test_a_component_is_named_by_its_class_and_equal_names_by_their_whole_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["optimizer", "model.hidden", "loss.hidden"]
    monkeypatch.chdir(ROOT)
    parameters = {key: {"choice": [1, 2]} for key in keys}

    class Plan:
        sweep, direction = type("Sweep", (), {"metric": "validation/loss", "parameters": parameters, "total": 1}), "min"

    sgd = {"_target_": "torch.optim.SGD", "lr": 1}
    values = {"optimizer": sgd, "model.hidden": True, "loss.hidden": "torch.nn.ReLU"}
    trials = [SweptTrial(1, values, "completed", "", 0.5, 1)]
    invocation: Any = SimpleNamespace(file=load("experiments/mlp.yaml"), hardware="", folder=Path())
    found = make_result(trials, Plan, invocation, logs_model=False)  # type: ignore[arg-type]
    assert found.headline[1] == "optimizer SGD, model.hidden true, loss.hidden ReLU"


def test_the_commands_repeat_what_was_overridden_but_what_the_sweep_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(monkeypatch, TRIALS, "train.epochs=3", "optimizer.lr=1", "seed=4")
    commands = dict(found.next)
    assert commands["RETRAIN"] == (
        "pipeline run experiments/sweep.yaml seed=4 train.epochs=3 optimizer.lr=0.09072 optimizer.momentum=0.7656 "
        "'model.hidden=[64, 64]'"
    )
    files = [f"runs/{RUN}/trial-00{number}/experiment.yaml" for number in (1, 4)]
    options = "seed=5 --seeds 5 --metric validation/loss --mode min"
    assert commands["CONFIRM"] == f"pipeline compare {' '.join(files)} {options}"


def test_page_and_mlflow_have_the_best_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(monkeypatch)
    page = render(found, about={})
    order = ["trial 4: validation/loss 0.02532", "Retrain", "Confirm", '<tr class="main"', "All numbers"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    assert record.mlflow_metrics(found)["main"]["validation/loss"] == 0.02532
    assert record.mlflow_description(found).startswith(f"**{found.verdict}**\n\n| trial | validation/loss |")
