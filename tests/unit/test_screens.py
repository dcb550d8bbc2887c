"""The screens that commands end with: fixed results in, the text of ``screens/NAME.txt`` out.

``UPDATE_SCREENS=1`` writes these files again, so that a change of a screen is seen in review.
"""

# promise: the screens at the end of commands, and whole reports: 24 lines, 80 columns

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import HARDWARE

from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places
from pipeline.report.swept import State, Swept, SweptReport, SweptTrial

FOLDER = "runs/20261125-211028-resnet-digits-3c35"
PLACES = Places(
    folder=FOLDER,
    run="latest",
    page=f"{FOLDER}/report.html",
    mlflow="pipeline ui",
    command="pipeline run experiments/resnet.yaml",
)


def sweep(*, copies: int = 1) -> SweptReport:
    found: list[tuple[float, float, list[int], State, float, int]] = [
        (0.03714, 0.8951, [128, 128], "finished", 0.03459, 27),
        (0.008046, 0.7167, [128, 128], "finished", 0.1339, 27),
        (0.004961, 0.9471, [32], "stopped early", 2.005, 1),
        (0.09072, 0.7656, [64, 64], "finished", 0.02532, 27),
    ]
    trials = [
        SweptTrial(
            number=number, state=state, value=value, epochs=epochs, run=f"sweep/{number}",
            values={"optimizer.lr": lr, "optimizer.momentum": momentum, "model.hidden": hidden},
        )
        for number, (lr, momentum, hidden, state, value, epochs) in enumerate(found * copies, start=1)
    ]  # fmt: skip
    words = ("optimizer.lr=0.09072", "optimizer.momentum=0.7656", "'model.hidden=[64, 64]'")
    swept = Swept(
        experiment="mlp-sweep", metric="validation/loss", mode="min", search="random", seed=1, best=4, run="sweep",
        command=("pipeline", "run", "experiments/sweep.yaml", *words), trials=tuple(trials),
        confirmation=("pipeline", "compare", "experiments/sweep.yaml", "--vary", "'optimizer.lr=0.037,0.091'"),
    )  # fmt: skip
    return SweptReport(swept=swept, hardware=HARDWARE, logs_model=True)


SCREENS: dict[str, Callable[[], object]] = {
    "sweep": sweep,
}


def check(name: str, text: str) -> None:
    """Compare a text with its file."""
    path = Path(__file__).parent / "screens" / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_has_this_text(name: str) -> None:
    check(name, shown(SCREENS[name]()))


def shown(report: object, places: Places = PLACES) -> str:
    lines = format_screen(report, places)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return "\n".join([*lines, ""])


def test_a_screen_says_what_is_left_out() -> None:
    assert "18 more: pipeline show latest --full" in shown(sweep(copies=7))


def test_the_result_in_a_line_is_that_of_the_screen() -> None:
    sentences = {name: getattr(make(), "verdict", "") for name, make in SCREENS.items()}
    assert sentences == {
        "sweep": "Best: trial 4 of 4, validation/loss 0.02532 (lr=0.09072, momentum=0.7656, hidden=[64, 64])",
    }
