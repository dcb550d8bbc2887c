"""``pipeline evaluate``: loss and metrics of a checkpoint on a held-out set, added to the run and to MLflow."""

from collections.abc import Callable
from pathlib import Path

from pipeline.commands.invocation import invoked
from pipeline.commands.preparation import planning, refuse_outer_launcher
from pipeline.drive import resume
from pipeline.drive.checkpoints import check_ended_training, choose
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.schema import Configuration
from pipeline.plan.plan import Plan, Planner
from pipeline.protocol.labels import Split
from pipeline.protocol.trial import Evaluation
from pipeline.record.folder import RunState, id_of, read_state
from pipeline.record.screen import Terminal
from pipeline.report.evaluated import EvaluationReport


def evaluate(
    file: ExperimentFile,
    *,
    folder: Path,
    checkpoint: str | None,
    split: Split | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[EvaluationReport], None],
) -> None:
    """Evaluate a checkpoint of a run that has ended; its journal and MLflow run get the values.

    Args:
        file: the experiment of the run, as in its folder, with overrides.
        folder: the run's folder.
        checkpoint: best, last or a step; None: the best if the experiment has ``checkpoint.best``, else the last.
        split: the set to evaluate; None: the test set if there is one, else the validation set.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the values.
        show: gets the result, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown.
    """
    refuse_outer_launcher("evaluate")
    state = read_state(folder)
    check_ended_training(state, command="evaluate")
    plan = make(file, state=state, checkpoint=checkpoint, split=split)
    with invoked(plan, file=file, terminal=terminal, verbose=verbose, folder=folder, adds=True) as invocation:
        (outcome,) = invocation.execute(plan.trials)
        assert outcome.evaluated is not None  # the trial has ended well
        report = EvaluationReport.of(
            outcome.evaluated, run=id_of(folder), trial=plan.main, has_choice=split is not None
        )
        invocation.show(report)
        show(report)


def make(file: ExperimentFile, *, state: RunState, checkpoint: str | None, split: Split | None) -> Plan:
    """Check the file, choose the checkpoint and plan the one trial; for the errors see `planning` and `choose`."""
    changes, parallel = resume.altered(file, state), file.experiment.parallel
    with planning(file, resumes=True) as (allowed, resources):
        chosen = choose(file, folder=state.folder, wanted=checkpoint, allowed=allowed)
        planner = Planner(file.experiment, resources, allowed)
        own = Configuration(strategy=parallel.strategy, workers=planner.workers, options=parallel.options)
        trial = planner.trial(
            Evaluation,
            own,
            checkpoints=chosen.address,
            step=chosen.manifest.step,
            best=chosen.best,
            split=split,
            changes=tuple(changes),
            note=chosen.note,
        )
    notes = (f"evaluated with another experiment than was trained: {change}" for change in changes)
    return Plan(
        command="evaluate", experiment=file.experiment, resources=resources, trials=(trial,), notes=tuple(notes)
    )
