"""``pipeline run``: check, plan, launch, and end in a result."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.commands.invocation import Invocation, invoked, planning
from pipeline.drive import preflight
from pipeline.drive import resume as recovery
from pipeline.drive.checkpoints import find_initial
from pipeline.drive.execute import as_ended, describe_sizes, explain_problems
from pipeline.drive.recorded_run import Membership
from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.launch.outer import check_workers, follow, leading
from pipeline.plan.outer_launcher import is_follower
from pipeline.plan.plan import Plan, describe, make_plan, record, restriction
from pipeline.protocol.events import WEIGHTS, Outcome, Started
from pipeline.protocol.trial import Baseline, Training
from pipeline.protocol.trial_result import TrialResult
from pipeline.record import journal
from pipeline.record.runs import LATEST
from pipeline.record.screen import Terminal
from pipeline.results.measured import Missing, result_of_quick, result_of_run
from pipeline.results.record import Result
from pipeline.results.speedup import Row, measure_rows
from pipeline.train.storage import Storage, address_of


def run(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    verbose: bool,
    terminal: Terminal,
    train_only: bool = False,
    quick: bool = False,
    show: Callable[[Result, Path], None] | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    member: Membership | None = None,
) -> None:
    """Measure the baseline, train, and report the speedup."""
    if is_follower():  # rank 0 is the driver
        follow(file.experiment)
        return
    with leading(file.experiment):
        if quick and resume is not None:
            raise UsageError("--quick starts a run of a few steps, so it can't resume one; remove --quick or --resume")
        earlier = recovery.earlier(file, resume) if resume is not None else None
        changes: list[str] = []
        if earlier is not None:
            file, kept = recovery.with_batch_of(file, earlier)
            changes = [*kept, *recovery.changes(file, earlier, allowed=allow_changed)]
            changes += [f"--resume continues {earlier.folder.name}"] if resume == LATEST else []
        plan = make(file, with_baseline=with_baseline, train_only=train_only, quick=quick, resumes=earlier is not None)
        plan = plan.model_copy(update={"notes": (*plan.notes, *changes)})
        folder = earlier.folder if earlier else None
        again = ("run", *(["--train-only"] if train_only else [] if with_baseline else ["--no-baseline"]))
        with invoked(
            plan, file=file, terminal=terminal, verbose=verbose, folder=folder, member=member, again=again, show=show
        ) as invocation:
            done, outcomes = set(invocation.results), list[Outcome]()
            if earlier is not None and (recovery.is_continued(file, earlier) or _has_lost_weights(invocation)):
                done -= {plan.main.name}  # the training is continued
            try:
                own = {  # measurements have no checkpoints
                    "checkpoints": address_of(plan.experiment.checkpoint.directory, run=invocation.folder),
                    "resume": earlier is not None,
                    "allow_changed": allow_changed,
                    "exports": (member is None or member.logs_model) and not quick,
                }
                outcomes = invocation.execute(
                    trial.model_copy(update=own) if isinstance(trial, Training) else trial
                    for trial in plan.trials
                    if trial.name not in done
                )
            finally:
                if plan.main.name in invocation.results:
                    try:
                        missing = find_missing(plan, outcomes, invocation.results)
                        report(invocation, missing=missing if with_baseline else "no baseline")
                    except (PipelineError, OSError):
                        raise
                    except Exception as error:
                        logging.getLogger(__name__).warning("the report failed", exc_info=error)
                        why = f"{type(error).__name__}: {error}; what was measured is kept"
                        invocation.warn(f"the report could not be made: {why}")
            if _has_lost_weights(invocation):
                raise ResourceError(
                    f"{invocation.folder}: the trained weights are lost; neither {WEIGHTS} nor a checkpoint of the "
                    "last step could be saved. Make room, and continue with --resume"
                )


def find_missing(plan: Plan, outcomes: Sequence[Outcome], results: Mapping[str, TrialResult]) -> Missing:
    """Return why a baseline that was planned has no result; empty if it has one, or if none was planned."""
    baselines = [trial for trial in plan.measured if isinstance(trial, Baseline)]
    if all(trial.name in results for trial in baselines):
        return ""
    last = outcomes[-1] if outcomes else Outcome()
    has_measured = (
        last.trained is not None and last.finished is not None and last.finished.result != last.trained.result
    )
    return "failed" if last.has_failed or has_measured else "interrupted"


def _has_lost_weights(invocation: Invocation) -> bool:
    """Return True if a training has ended, but nothing has its final weights."""
    if (result := invocation.results.get(invocation.plan.main.name)) is None:
        return False
    keeps_none = not invocation.plan.experiment.checkpoint.keep
    is_older = result.unsaved is not None and result.unsaved.newest != result.steps
    return (keeps_none or is_older) and not (invocation.folder / WEIGHTS).is_file()


def make(
    file: ExperimentFile,
    *,
    with_baseline: bool,
    train_only: bool = False,
    quick: bool = False,
    resumes: bool = False,
) -> Plan:
    """Check the file and plan the trials; for ``resumes`` and the errors see `planning`."""
    with planning(file, resumes=resumes) as (allowed, resources):
        if file.experiment.checkpoint.directory is not None:
            Storage(file.experiment.checkpoint.directory)  # tells whether there is such a protocol
        return check_workers(
            make_plan(
                file.experiment,
                resources,
                allowed=allowed,
                with_baseline=with_baseline,
                train_only=train_only,
                quick=quick,
            )
        )


def dry_run(
    file: ExperimentFile, *, with_baseline: bool, train_only: bool = False, quick: bool = False, as_json: bool = False
) -> str:
    """Describe the plan in words or as JSON; load the data to count its samples, start nothing.

    Within an outer launcher rank 0 describes the plan for all ranks; the others return an empty text.
    """
    if is_follower():
        follow(file.experiment)
        return ""
    with leading(file.experiment):
        plan = make(file, with_baseline=with_baseline, train_only=train_only, quick=quick)
        with explain_problems(file):
            sizes = preflight.data_sizes(file.experiment, allowed=plan.main.allowed)
        notes = [f"{file.path} extends {', which extends '.join(map(str, file.bases))}"] if file.bases else []
        initial = find_initial(file.experiment)
        notes += [f"starts from {initial.source}"] if initial is not None else []
        return (record if as_json else describe)(plan.model_copy(update={"notes": (*notes, *plan.notes)}), sizes)


def report(invocation: Invocation, *, missing: Missing = "") -> None:
    """End the run in its result: recorded, saved and shown. ``missing``: why no baseline was measured."""
    plan, finished = invocation.plan, invocation.finished
    rows = measure_rows([as_ended(trial, finished) for trial in plan.measured], finished)
    main, resources = plan.main, plan.resources
    assert isinstance(main, Training)
    opened = journal.opened(invocation.folder / journal.FILE_NAME)
    shared = {"hardware": invocation.hardware, "command": opened.command if opened else ""}
    if main.is_quick:
        seconds = estimate_training_s(rows[-1], invocation)
        invocation.finish(result_of_quick(rows[-1], **shared, training_s=seconds), draws=False)
        return
    sizes = describe_sizes(journal.read(invocation.folder / journal.FILE_NAME), trial=main.name)
    measured = result_of_run(
        rows,
        **shared,
        goodput=invocation.goodput,
        happened=tuple(sizes) if main.is_elastic else (),
        missing=missing,
        option=restriction(main).partition(":")[0],
        cores=resources.cpus // resources.nodes,
    )
    invocation.finish(measured, draws=not main.train_only)


def estimate_training_s(row: Row, invocation: Invocation) -> float:
    """Return about how many seconds the whole training will take: startup, steps and evaluations, as timed."""
    train, spent = row.trial.experiment.train, invocation.goodput
    events = journal.marked(invocation.folder / journal.FILE_NAME, "started")
    started = [event for event in events if isinstance(event, Started) and event.trial == row.key][-1]
    steps = train.steps or (train.epochs or 1) * started.steps_per_epoch
    seconds = steps * row.step_ms / 1000
    if train.minutes is not None:
        seconds = min(seconds, 60 * train.minutes)
    if started.validation_samples and spent is not None:
        every = train.evaluate_every_steps or train.evaluate_every_epochs * started.steps_per_epoch
        done = steps if not row.step_ms else min(steps, 1000 * seconds / row.step_ms)
        seconds += max(1, math.ceil(done / every)) * spent.seconds.get("evaluation", 0.0)
    return seconds + (row.start_s or 0.0)
