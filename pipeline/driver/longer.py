"""``--resume RUN train.epochs=20``: continue a finished run, and name what differs from a run of that length."""

from collections.abc import Iterator

from pipeline.config.load import ExperimentFile
from pipeline.config.summary import flatten
from pipeline.config.train import Train
from pipeline.errors import UsageError
from pipeline.recording.folder import RunState
from pipeline.training.checkpoints.storage import Storage, address_of
from pipeline.wording import counted

LENGTHS = ("train.epochs", "train.early_stopping")
"""Prefixes of keys that say how long a run trains."""


def is_longer(now: Train, before: Train) -> bool:
    """Return True if a training goes on where an earlier one has ended: more epochs, or later early stopping."""
    more = now.epochs > before.epochs
    return more or (now.epochs == before.epochs and now.early_stopping != before.early_stopping)


def refuse_finished(file: ExperimentFile, state: RunState) -> None:
    """Refuse a finished run that the file doesn't continue.

    Raises:
        UsageError: the training isn't longer than the run's, or the run has no checkpoint to continue from.
    """
    if not is_longer(file.experiment.train, state.experiment.train):
        raise UsageError(
            f"--resume: {state.folder} has finished; start a new run without --resume, or write a train.epochs above "
            f"{state.experiment.train.epochs} to continue it"
        )
    address = address_of(file.experiment.checkpoint.directory, run=state.folder)
    if not Storage(address).folders():
        raise UsageError(f"--resume: {state.folder} has finished, and {address} has no checkpoint to continue from")


def differences(file: ExperimentFile, state: RunState) -> Iterator[str]:
    """Yield what makes a continued run differ from one that was as long from the start."""
    now, before = file.experiment.train, state.experiment.train
    if now.epochs == before.epochs:
        return
    length = counted(before.epochs, "epoch")
    for key, value in flatten(file.experiment).items():
        if "${total_steps}" in value:
            yield (
                f"{key} is {value}: steps up to the checkpoint used the {length} of before, so the run differs from "
                f"one of {now.epochs} epochs from the start"
            )
    follows = now.early_stopping is not None or "ReduceLROnPlateau" in str(file.experiment.scheduler)
    if follows and state.status == "FINISHED" and before.epochs % now.evaluate_every_epochs:
        yield (
            f"epoch {before.epochs} was evaluated as the last one, and counts for what follows the metric; a run of "
            f"{now.epochs} epochs from the start would not have evaluated it"
        )
