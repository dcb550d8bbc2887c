"""The parts of a screen in words: the hardware, what to do about a speedup that is not clear, and where to look."""

import shlex
from collections.abc import Iterator

from pipeline.report.screens.screen_layout import LABEL, WIDTH, Places, label, label_command
from pipeline.report.text.claims import Doubt, Outcome


def shorten_hardware(hardware: str) -> str:
    """Return the cores and GPUs of a description of the hardware, e.g. "2 CPU cores, no GPU"."""
    parts = hardware.split(", ")
    cores = next((part for part in parts if part.endswith((" core", " cores")) and part[0].isdigit()), "")
    if not cores:
        return hardware
    gpus = next((part for part in parts if part == "no GPU" or " x " in part), "")
    return ", ".join(filter(None, [cores.replace(" core", " CPU core"), gpus]))


def format_doubt(doubt: Doubt | None, places: Places) -> Iterator[str]:
    """Yield why a speedup is inconclusive, and what to do next."""
    if doubt is None:
        return
    yield from label("REASON", doubt.reason)
    if doubt.command:
        verb, _, *settings = doubt.command.split()
        given = shlex.split(places.command)[2:] or ["FILE"]
        taken = {word.partition("=")[0] for word in settings}
        kept = [word for word in given if word.partition("=")[0] not in taken] if verb == "run" else given[:1]
        yield from label("NEXT", doubt.remedy)
        yield from label_command("", ["pipeline", verb, *map(shlex.quote, kept), *settings])


def format_invalid(outcome: Outcome, places: Places) -> Iterator[str]:
    """Yield what to check if a loss differs and nothing explains that."""
    if outcome != "invalid":
        return
    yield from label(
        "CHECK",
        "Code in your model, loss or dataset that depends on the rank, or random numbers from your own generators",
    )
    settings = {"train.precision": "fp64", "train.epochs": "1"}
    given = shlex.split(places.command) or ["pipeline", "run", "FILE"]
    words = [shlex.quote(word) for word in given if word.partition("=")[0] not in settings]
    yield from label_command("CONFIRM", [*words, *(f"{key}={value}" for key, value in settings.items())])


def format_places(places: Places) -> tuple[str, ...]:
    """Return where the report is, and the commands that show more."""
    page = label("Report", places.page) if places.page else label("Folder", places.folder)
    words = ["pipeline", "show", places.run, "--full"]
    more = " ".join(words)
    together = f"{more}    MLflow: {places.mlflow}"
    if places.mlflow and len(together) <= WIDTH - LABEL:
        return (*page, *label("More", together), *places.others)
    mlflow = label("MLflow", places.mlflow) if places.mlflow else ()
    return (*page, *label_command("More", words), *mlflow, *places.others)
