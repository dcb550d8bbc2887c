"""``--resume RUN train.epochs=20``: continue a finished run, and name what differs from a run of that length."""

import math
from collections.abc import Iterator

from pipeline.drive.checkpoint_choice import describe_missing_end
from pipeline.errors import UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.summary import flatten
from pipeline.experiment.train import Train
from pipeline.record.folder import RunState
from pipeline.tracking.outcome import TrackingOutcome
from pipeline.train.storage import Storage, address_of


def is_longer(now: Train, before: Train) -> bool:
    """Return True if a run continues an earlier run: more epochs, steps or time, or different early stopping."""
    length, earlier = ((train.epochs or 0, train.steps or 0) for train in (now, before))
    if length == earlier:
        has_more_time = (now.minutes or math.inf) > (before.minutes or math.inf)
        return has_more_time or now.early_stopping != before.early_stopping
    return all(own >= old for own, old in zip(length, earlier, strict=True))


def refuse_finished(file: ExperimentFile, state: RunState) -> None:
    """Refuse a finished run that the file doesn't continue.

    Raises:
        UsageError: the training isn't longer than the run's, or the run has no checkpoint to continue from.
    """
    if not is_longer(file.experiment.train, state.experiment.train):
        outcome = TrackingOutcome.kept(state.folder)
        is_sent = outcome is not None and outcome.delivered
        sync = "" if is_sent else f" To send all its results to MLflow: pipeline sync {state.folder}."
        raise UsageError(
            f"--resume: {state.folder} has finished.{sync} To continue it, train for more than "
            f"{state.experiment.train.length}, for example with a larger train.epochs. "
            "To train again, start a new run without --resume."
        )
    address = address_of(file.experiment.checkpoint.directory, run=state.folder)
    if not Storage(address).folders():
        raise UsageError(
            f"--resume: {state.folder} has finished, and {address} has no checkpoint. Start a new run without --resume."
        )


def differences(file: ExperimentFile, state: RunState) -> Iterator[str]:
    """Yield the reasons why a continued run differs from a run of this length started from scratch."""
    now, before = file.experiment.train, state.experiment.train
    if state.status == "FINISHED" and (note := describe_missing_end(file, folder=state.folder)):
        yield f"{note} Training continues from the checkpoint."
    if now.length == before.length:
        return
    for key, value in flatten(file.experiment).items():
        if "${total_steps}" in value:
            yield (
                f"{key}: {value} follows from {now.length} now. The steps before the checkpoint used the schedule for "
                f"{before.length}, so the result differs from a run of {now.length} started from scratch."
            )
    follows = now.early_stopping is not None or "ReduceLROnPlateau" in str(file.experiment.scheduler)
    if follows and state.status == "FINISHED" and not _evaluates_there(now, before):
        yield (
            f"The earlier run was evaluated at its end, after {before.length}. Early stopping and ReduceLROnPlateau "
            f"use this evaluation. A run of {now.length} started from scratch may not evaluate there."
        )


def _evaluates_there(now: Train, before: Train) -> bool:
    """Return True if a longer run always evaluates at the step where the earlier run ended."""
    if now.evaluate_every_steps is not None:
        return before.steps is not None and before.steps % now.evaluate_every_steps == 0
    return before.epochs is not None and before.epochs % now.evaluate_every_epochs == 0
