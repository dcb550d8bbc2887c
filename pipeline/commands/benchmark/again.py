"""Measure the speedup of a finished run again, from its last checkpoint: ``pipeline benchmark RUN``.

The run has finished: it keeps its status and duration, also if the measurement fails, is interrupted or killed.
"""

from collections.abc import Callable
from pathlib import Path

from pipeline.commands.invocation import invoked
from pipeline.commands.preparation import refuse_outer_launcher
from pipeline.commands.run import make, report
from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Experiment
from pipeline.driver.checkpoint_choice import describe_missing_end
from pipeline.errors import UsageError
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import Training
from pipeline.recording.journal import journal
from pipeline.recording.journal.folder import read_state
from pipeline.recording.terminal.terminal import Terminal
from pipeline.report.report import Report
from pipeline.training.checkpoints.storage import Storage, address_of

MOST_PAIRS = 1000
"""Most pairs of slots within a budget that was asked for: it alone decides."""


def measure_again(
    file: ExperimentFile,
    *,
    folder: Path,
    budget_s: float | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Report, Path], None],
) -> None:
    """Measure baseline and training in turn once more; the run's journal, report and MLflow run get the result.

    Args:
        file: the experiment of the run, as in its folder.
        folder: the run's folder.
        budget_s: seconds for the slots; None takes the experiment's ``benchmark.time_budget_s``.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the report.
        show: gets the report and the folder of the run, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown.
    """
    refuse_outer_launcher("benchmark")
    _require_finished(folder)
    plan = make(file, with_baseline=True)
    main = plan.main
    started = _time_to_first_step(folder, trial=main.name)
    if not isinstance(main, Training) or not main.compared_with:
        raise UsageError(
            f"{folder.name}: {main.title} has no baseline that rank 0 can time alternately with it. "
            "Use pipeline benchmark FILE, which measures the configurations one after the other."
        )
    address = address_of(file.experiment.checkpoint.directory, run=folder)
    if not Storage(address).folders():
        raise UsageError(f"{folder.name}: {address} has no checkpoint, from which the model would be loaded")
    if note := describe_missing_end(file, folder=folder):
        raise UsageError(
            f"{folder.name}: {note} pipeline benchmark needs a checkpoint of the last step. "
            "Train again, or use pipeline benchmark FILE."
        )
    again = main.model_copy(
        update={"experiment": _within(main.experiment, budget_s=budget_s), "checkpoints": address, "resume": True}
    )
    with invoked(plan, file=file, terminal=terminal, verbose=verbose, folder=folder, adds=True) as invocation:
        invocation.execute([again])
        with invocation.unharmed("the report"):
            show(report(invocation, time_to_first_step_s=started), folder)


def _within(experiment: Experiment, *, budget_s: float | None) -> Experiment:
    """Return the experiment of the trial with that budget; the run's own stays, as MLflow's parameters can't change."""
    if budget_s is None:
        return experiment
    longer = experiment.benchmark.model_copy(update={"time_budget_s": budget_s, "rounds": MOST_PAIRS})
    return experiment.model_copy(update={"benchmark": longer})


def _require_finished(folder: Path) -> None:
    """Refuse a run that has not finished.

    Raises:
        UsageError: it has not.
    """
    state = read_state(folder)
    if state.status != "FINISHED":
        state_now = "hasn't finished: continue it with --resume"
        if state.status == "RUNNING":
            state_now = f"is still running in {journal.describe_writer(folder / journal.FILE_NAME)}"
        raise UsageError(f"{folder}: this run {state_now}; pipeline benchmark RUN needs a completed training")


def _time_to_first_step(folder: Path, *, trial: str) -> float | None:
    """Return the seconds that the training of a run took to its first step; None if the journal has no such figure.

    Raises:
        UsageError: the run has no training.
    """
    ends = [event for event in journal.read(folder / journal.FILE_NAME) if isinstance(event, Finished)]
    waits = [end.time_to_first_step_s for end in ends if end.trial == trial]
    if not waits:
        raise UsageError(f"{folder}: this run has no training; pipeline benchmark RUN needs one of pipeline run")
    return next((wait for wait in waits if wait is not None), None)
