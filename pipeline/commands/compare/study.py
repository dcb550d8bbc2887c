"""``pipeline compare FILE FILE``: train pairs of variants with the same seeds, and answer which one is better."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from pipeline.commands.compare.study_answer import compare_study
from pipeline.commands.compare.study_plan import StudyPlan
from pipeline.commands.compare.study_record import Looks, StudyRecord
from pipeline.commands.invocation import Invocation, invoked
from pipeline.commands.preparation import refuse_outer_launcher
from pipeline.commands.study_trials import finish_trials
from pipeline.commands.study_trials.assignment import TrialJob, folder_name
from pipeline.commands.study_trials.journals import find_trial, records, state_of
from pipeline.commands.study_trials.sweep_progress import SweepProgress
from pipeline.drive.resume import earlier
from pipeline.errors import ResourceError, TrainingError, UsageError
from pipeline.protocol.events import Tagged
from pipeline.record import provenance
from pipeline.record.folder import id_of
from pipeline.record.screen import Terminal, write
from pipeline.report.compared import FILE_NAME, Compared
from pipeline.report.swept import LEFT
from pipeline.wording import counted

_LOAD_S, _MUCH_LOAD = 1.0, 0.1
_MAY_CHANGE = (
    *("tracking.", "benchmark.", "sweep", "loader.num_workers"),
    *(f"parallel.{name}" for name in ("address", "grace_s", "timeout_s")),
)
"""Prefixes of keys that decide nothing of what a training learns, and may change when a study is resumed."""


def study(
    plan: StudyPlan,
    looks: Sequence[int] | None,
    *,
    resume: str | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Compared], None],
) -> None:
    """Train pairs until their number is reached or the answer is clear, and report it.

    Args:
        plan: the variants.
        looks: numbers of pairs at which the answer is looked at; None: those of the study to resume.
        resume: the study to resume: "latest", an id or a folder; None starts a new one.
        verbose: True to show Ray's output.
        terminal: shows progress, warnings and the answer.
        show: gets the answer, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown; TrainingError if all trainings failed, or some did not end.
    """
    refuse_outer_launcher("compare")
    file = plan.variants[0].file
    before, record = open_record(plan, looks, resume=resume)
    if plan.is_alone and (load := psutil.cpu_percent(interval=_LOAD_S) / 100) > _MUCH_LOAD:
        note = (
            f"other processes used {load:.0%} of the cores when a session of the study started: times may be too long"
        )
        record = record.model_copy(update={"notes": (*record.notes, note)})
    with (
        invoked(plan.plan, file=file, terminal=terminal, verbose=verbose, folder=before) as invocation,
        _continuable(invocation.folder.name),
    ):
        record.keep(invocation.folder)
        job = _job(plan, invocation)
        try:
            lacked, pairs = _train(plan, record, job=job, invocation=invocation)
            tell = partial(write, terminal.progress)
            finish_trials.send(invocation.folder, patience_s=job.grace_s, tell=tell, warn=invocation.warn)
        finally:
            compared = compare_study(invocation.folder, hardware=invocation.hardware)
            _report(compared, invocation)
            show(compared)
            if lacking := finish_trials.missing(invocation.folder):
                invocation.warn(lacking)
        _check_ends(invocation.folder, lacked=lacked)
        record.mark_answered(pairs).keep(invocation.folder)
        invocation.save_report(compared)


@contextmanager
def _continuable(run: str) -> Iterator[None]:
    """Add a note to an interruption inside: how to continue the study."""
    try:
        yield
    except KeyboardInterrupt as error:
        given = ["", *shlex.split(provenance.command())]
        words = [
            word
            for before, word in pairwise(given)
            if not word.startswith("--resume") and (before != "--resume" or word.startswith("-") or "=" in word)
        ]
        words = words or ["pipeline", "compare", "..."]
        error.add_note(f"continue it with: {shlex.join(words)} --resume {run}")
        raise


def open_record(plan: StudyPlan, looks: Sequence[int] | None, *, resume: str | None) -> tuple[Path | None, StudyRecord]:
    """Return the folder and the record of the study to resume; None and a new record without one. See `study`.

    Raises:
        UsageError: there is no such study, it compares other variants or by something else, or has its answer already.
    """
    if resume is None:
        return None, _new_record(plan, looks or ())
    folder = earlier(plan.variants[0].file, resume, role="study").folder
    return folder, _continue(plan, folder, looks)


def _new_record(plan: StudyPlan, looks: Sequence[int]) -> StudyRecord:
    return StudyRecord(
        question=plan.question,
        descriptions={one.name: one.description for one in plan.variants},
        settings={one.name: one.settings for one in plan.variants},
        is_alone=plan.is_alone,
        looks=(Looks(pairs=tuple(looks)),),
    )


def _continue(plan: StudyPlan, folder: Path, looks: Sequence[int] | None) -> StudyRecord:
    """Return the record of a study to resume, with the looks of this session.

    Raises:
        UsageError: it compares other variants or by something else, or has its answer already.
    """
    record = StudyRecord.read(folder)
    looks = record.looks[-1].pairs if looks is None else looks
    now = _new_record(plan, looks)
    changed = [
        f"{name}: {key} was {then.get(key)}, is now {value.get(key)}"
        for name, value in now.settings.items()
        for then in [record.settings.get(name, {})]
        for key in {**then, **value}
        if then.get(key) != value.get(key) and not key.startswith(_MAY_CHANGE)
    ]
    if len(record.settings) != len(now.settings):
        changed = [f"it compares {counted(len(record.settings), 'variant')}"]
    changed += [
        f"--{name} was {then}, is now {value}"
        for (name, value), (_, then) in zip(plan.question, record.question, strict=True)
        if then != value
    ]
    if record.is_alone != plan.is_alone:
        changed.append("--target must stay as it was")
    if changed:
        raise UsageError(
            "\n".join([f"--resume: {folder} is another study. Start a new one without --resume.", *changed])
        )
    failed = any(state_of(folder / folder_name(one.number))[0] == "failed" for one in records(folder))
    return record.extend(looks, has_failures=failed)


def _job(plan: StudyPlan, invocation: Invocation) -> TrialJob:
    return TrialJob(
        files={one.name: one.file for one in plan.variants},
        cwd=str(Path.cwd()),
        folder=invocation.folder.absolute(),
        metric=plan.metric,
        direction=plan.direction,
        logs_models=False,
        shares_cluster=plan.shares_cluster,
        verbose=invocation.verbose,
        variables=tuple(os.environ),
    )


def _train(plan: StudyPlan, record: StudyRecord, *, job: TrialJob, invocation: Invocation) -> tuple[str, int]:
    """Train the pairs up to each look, until the answer is clear.

    Returns:
        What a cluster lacked, if it did, and the number of pairs.
    """
    from pipeline.commands.study_trials.tuner import SweepDisplay, searching

    looks = record.looks[-1].pairs
    progress = SweepProgress(
        total=len(plan.trainings(looks[0])),
        epochs=plan.variants[0].file.experiment.train.epochs or 0,
        metric=plan.metric,
        direction=plan.direction,
        slots=plan.concurrent,
        title="study",
        is_search=False,
        first=len(plan.variants),
    )
    display = SweepDisplay(progress, invocation)
    tried: set[int] = set()
    with searching(job=job, display=display) as search:
        for pairs in looks:
            trainings = plan.trainings(pairs)
            progress.total = len(trainings)
            for one in trainings:
                if state_of(job.folder_of(one.number))[0] == "finished":
                    progress.update(find_trial(job.folder, one, metric=job.metric))
                    tried.add(one.number)
            if todo := [one for one in trainings if one.number not in tried]:
                search(todo, needs=plan.needs)
                tried.update(one.number for one in todo)
            if display.lacked or pairs == looks[-1]:
                break
            found = compare_study(job.folder)
            answers = [one.answer for one in found.others]
            if None in answers:  # nothing to compare, and more of the same would not change that
                break
            if all(one is not None and one.verdict != "inconclusive" for one in answers):
                break
            display.tell(f"after {pairs} pairs: {found.verdict}")
            record.mark_seen().keep(job.folder)
    return display.lacked, pairs


def _report(compared: Compared, invocation: Invocation) -> None:
    """Print, record and save the answer."""
    invocation.show(compared, summary=compared.markdown())
    for training in records(invocation.folder):
        tags = {"variant": training.variant, "seed": str(training.values["seed"])}
        invocation.recorder.receive(Tagged(run=f"{id_of(invocation.folder)}/{folder_name(training.number)}", tags=tags))
    invocation.recorder.receive(Tagged(run=id_of(invocation.folder), tags=compared.tags))
    invocation.save({FILE_NAME: compared.model_dump_json(indent=1) + "\n"})


def _check_ends(folder: Path, *, lacked: str) -> None:
    """Raise if all trainings failed or some are left; ``lacked`` is what the cluster lacked, if it did.

    Raises:
        TrainingError: all failed, or some did not end; ResourceError: the cluster lacked resources.
    """
    ends = [(training.title, *state_of(folder / folder_name(training.number))) for training in records(folder)]
    failed = [message for _, state, message in ends if state == "failed"]
    if failed and len(failed) == len(ends):
        raise TrainingError(f"all {len(failed)} trainings failed. The first error: {failed[0]}")
    if left := [title for title, state, _ in ends if state in LEFT]:
        message = f"trainings that did not end: {'; '.join(left)}. To continue them, use --resume."
        raise ResourceError(f"{message} Cause: {lacked}") if lacked else TrainingError(message)
