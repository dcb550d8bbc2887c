"""A trial of a sweep: the function that Ray Tune calls for it, and the process that trains it.

In an actor, `train_trial` starts this module as a process, which is ``pipeline run`` in a folder inside the sweep's,
follows its journal, and reports each evaluation.
"""

import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import psutil
from pydantic import ValidationError

from pipeline.commands.options import say
from pipeline.errors import PipelineError, ResourceError, Terminated, terminate
from pipeline.experiment.load import ExperimentFile, override
from pipeline.experiment.sweep import Parameter, Sweep
from pipeline.experiment.values import Direction, Frozen
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import STOPPED_EARLY, Metrics
from pipeline.protocol.trial import Trial
from pipeline.record import journal
from pipeline.record.folder import trials_of, write_atomically
from pipeline.system import (
    begin_stage,
    end_stage,
    exit_in_time,
    huge_pages,
    importable,
    kill_tree,
    undisturbed,
)
from pipeline.tracking.follow import sync
from pipeline.tracking.store import TrackingOutcome
from pipeline.wording import counted

CPUS, MODULE = "parallel.cpus_per_worker", "pipeline.commands.sweep_trial"
EPOCH, VALUE = "epoch", "value"
"""Names of an evaluation's epoch and value in what Ray Tune is told; it ranks trials by a score, which is never NaN."""
RECORD_NAME, OUTPUT_NAME = "trial.json", "output.txt"
"""Files in a trial's folder: its `Record`, and the output of its process, which is short unless it fails."""
LOOK_S, AFTER_GRACE_S = 0.1, 15.0
"""Seconds between two looks, and beyond ``parallel.grace_s`` that a trial has to send the rest of its results."""
State = Literal["completed", "stopped early", "failed", "interrupted", "running", "not started"]
ENDED: tuple[State, ...] = ("completed", "stopped early")  # States of trials that are not trained again


class Record(Frozen):
    """Number, values and end of a trial, kept in its folder once it is started."""

    number: int  # from 1
    values: Mapping[str, Any]  # by dotted key
    failure: str = ""  # why the trial failed
    lacked: str = ""  # what the cluster lacked when the trial was last tried
    stopped_after: int | None = None  # epochs after which Ray Tune stopped it; it may have trained more until it ended

    @property
    def title(self) -> str:
        """Title of the trial, e.g. "trial 3: optimizer.lr=0.01, model.width=64"."""
        return f"trial {self.number}: {', '.join(override(key, value) for key, value in self.values.items())}"

    @property
    def early_stop(self) -> str:
        """The fact that Ray Tune has stopped the trial early; empty if it has not."""
        return "" if self.stopped_after is None else f"{STOPPED_EARLY} after epoch {self.stopped_after}"

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read the record of a trial's folder; that of a trial 0 without values if it is missing or damaged."""
        try:
            return cls.model_validate_json((folder / RECORD_NAME).read_bytes())
        except (OSError, ValidationError):
            return cls(number=0, values={})

    def keep(self, folder: Path, **changed: object) -> None:
        """Write the record, with changes, into the trial's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RECORD_NAME, self.model_copy(update=changed).model_dump_json(indent=1) + "\n")


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep. It may contain secrets: passed in memory and pipes only."""

    sweep: Sweep
    direction: Direction  # in which the sweep's metric improves
    file: ExperimentFile  # of all trials, without the values of each
    concurrent: int
    seed: int
    records: tuple[Record, ...]  # all trials in order; empty with Optuna, which draws them one by one
    epochs: int  # largest number of a trial
    logs_models: bool  # each trial's model goes to the store, as tracking.log_model: true asks; else the best one's
    plan: Plan  # for the run's folder and the tracking store
    folder: Path = Path()  # the sweep's, absolute
    verbose: bool = False
    cwd: str = field(default_factory=os.getcwd)
    variables: tuple[str, ...] = field(default_factory=lambda: tuple(os.environ))  # the user's; Ray adds some

    @property
    def grace_s(self) -> float:
        """Seconds that a trial has to write its checkpoint and to end when it is stopped."""
        return self.file.experiment.parallel.grace_s + AFTER_GRACE_S

    @property
    def shares_cluster(self) -> bool:
        """True if the trials' workers run on a cluster, where other jobs may have taken their resources."""
        parallel = self.file.experiment.parallel
        return parallel.launcher == "ray" and parallel.address is not None


class SweptTrial(NamedTuple):
    """State of a trial, and the reason for it."""

    number: int
    values: Mapping[str, Any]
    state: State
    message: str = ""  # error of a failed trial, or why it was stopped
    value: float | None = None  # last one of the sweep's metric
    epochs: int = 0  # trained until then

    @property
    def is_known(self) -> bool:
        """True if it has a value that is not NaN."""
        return self.value is not None and not math.isnan(self.value)


def describe_device(trial: Trial) -> str:
    """Return what each worker of a trial has, in words."""
    cores = f"{counted(trial.cpus_per_worker, 'core')} each"
    return f"{counted(trial.devices_per_worker, 'GPU')} and {cores}" if trial.devices_per_worker else cores


def find_concurrency(
    file: ExperimentFile, resources: Resources, *, allowed: tuple[str, ...], total: int, asked: int | None = None
) -> tuple[int, int]:
    """Return the number of concurrent trials, and the cores of each of their workers.

    Many concurrent trials with few cores finish earlier than consecutive trials with many; idle cores are distributed.
    On a cluster, which others use, what is free now counts, unless ``sweep.concurrent`` asks for more.
    """
    from pipeline.launch.cluster import count_fitting, per_worker  # loads Ray, which the process of a trial need not

    parallel = file.experiment.parallel
    least = file.vary({CPUS: parallel.cpus_per_worker or 1}).experiment
    trial = make_plan(least, resources, allowed=allowed, with_baseline=False).main
    side_by_side = resources.cpus // resources.nodes // trial.cpus_per_worker * resources.nodes
    if trial.devices_per_worker:
        side_by_side = min(side_by_side, len(resources.gpus) // trial.devices_per_worker)
    fit = max(1, side_by_side // trial.workers)  # `make_plan` has checked that one trial does
    if asked is not None and asked > fit and not resources.is_autoscaled:
        raise ResourceError(
            f"sweep.concurrent: {asked} trials of {counted(trial.workers, 'worker')} with {describe_device(trial)} "
            f"don't fit at the same time. {resources.node} has {resources.summary}. Use at most {fit}."
        )

    def count_free(one: Trial) -> int:
        return sum(count_fitting(node, per_worker(one)) for node in resources.idle)

    free = max(1, count_free(trial) // trial.workers) if resources.idle else fit
    concurrent = min(asked or min(fit, free), total)
    most = max(1, resources.cpus // resources.nodes // -(-concurrent * trial.workers // resources.nodes))
    if parallel.cpus_per_worker or not resources.idle:
        return concurrent, parallel.cpus_per_worker or most
    wider = (trial.model_copy(update={"cpus_per_worker": cpus}) for cpus in range(most, 1, -1))
    fitting = (one for one in wider if count_free(one) >= concurrent * trial.workers)
    return concurrent, next(fitting, trial).cpus_per_worker


class TrialFailed(Exception):
    """Failure of a trial's process, with a message for the user."""


def name_folder(number: int) -> str:
    """Return the name of a trial's folder inside the sweep's, which is its name for Ray Tune, too."""
    return f"trial-{number:03}"


def find_value(parameter: Parameter, drawn: Any) -> Any:
    """Return the value that was drawn: of a list by its index; a fraction has four significant digits."""
    if parameter.choice is not None:
        return parameter.choice[drawn]
    ends = parameter.uniform or parameter.log_uniform
    return drawn if ends is None else min(max(float(f"{drawn:.4g}"), ends[0]), ends[1])


def has_begun(folder: Path) -> bool:
    """Return True if a trial's journal has its first event, so that it can be resumed."""
    path = folder / journal.FILE_NAME
    return path.is_file() and journal.opened(path) is not None


def state_of(folder: Path) -> tuple[State, str]:
    """Return the state of a trial, and the reason for it."""
    record, path = Record.read(folder), folder / journal.FILE_NAME
    if record.failure:
        return "failed", record.failure
    if not has_begun(folder):
        return "not started", record.lacked
    if journal.is_open(path):
        return "running", ""
    if record.lacked:  # the last attempt may have ended before it wrote to the journal
        return "interrupted", record.lacked
    end = journal.ending(path)
    if end is not None and end.status != "KILLED":
        return "completed" if end.status == "FINISHED" else "failed", end.message
    if end is not None and end.is_stopped_early:
        return "stopped early", end.message
    if record.early_stop:  # it took too long to end, and was killed
        return "stopped early", record.early_stop
    return "interrupted", end.message if end is not None else "its process was killed"


def iter_evaluations(tail: journal.Tail, metric: str) -> Iterator[tuple[int, float]]:
    """Yield epoch and value of a trial's evaluations that ``tail`` has not read yet."""
    for event in tail.new():
        if isinstance(event, Metrics) and event.trial == "main":
            yield from ((event.epoch, point.value) for point in event.points if point.name == metric)


def find_trial(sweep: Path, record: Record, *, metric: str) -> SweptTrial:
    """Return the state and the last evaluation of a trial."""
    folder = sweep / name_folder(record.number)
    state, message = state_of(folder)
    evaluations = [*iter_evaluations(journal.Tail(folder / journal.FILE_NAME, metric), metric)]
    epochs, value = evaluations[-1] if evaluations else (0, None)
    message = "" if state == "completed" else message.partition("\n")[0]
    return SweptTrial(record.number, record.values, state, message, value, epochs)


def find_trials(plan: SweepPlan) -> list[SweptTrial]:
    """Return the state of all trials, as far as they are known: with Optuna, of those that have started."""
    started = (Record.read(plan.folder / name_folder(number)) for number in itertools.count(1))
    records = plan.records or itertools.takewhile(lambda record: record.number, started)
    return [find_trial(plan.folder, record, metric=plan.sweep.metric) for record in records]


def sort_trials(trials: Sequence[SweptTrial], direction: Direction) -> list[SweptTrial]:
    """Return the trials by their values, the completed before others: a trial that was stopped early was worse."""
    sign = 1 if direction == "min" else -1
    return sorted(
        trials, key=lambda one: (not one.is_known, one.state != "completed", sign * ((one.is_known and one.value) or 0))
    )


def best_of(trials: Sequence[SweptTrial], direction: Direction) -> SweptTrial | None:
    """Return the best of the trials that were trained to their end, the first of equal ones; None if there is none."""
    return next((one for one in sort_trials(trials, direction) if one.is_known and one.state == "completed"), None)


def train_trial(config: Mapping[str, Any], plan: SweepPlan) -> None:
    """Train a trial in a process and report its evaluations to Ray Tune, those of earlier sessions first.

    A trial that ended in an earlier session is not trained again. Tune stops a trial early in ``tune.report``.
    """
    from ray import tune  # not in the process

    name, metric = tune.get_context().get_trial_name(), plan.sweep.metric
    number, folder = int(name.rpartition("-")[2]), plan.folder / name
    drawn = {key: find_value(one, config[key]) for key, one in plan.sweep.parameters.items() if not plan.records}
    record = plan.records[number - 1] if plan.records else Record(number=number, values=drawn)
    path, deadline = folder / journal.FILE_NAME, time.monotonic() + plan.grace_s
    tail, worst = journal.Tail(path, metric), math.inf if plan.direction == "min" else -math.inf
    has_value = False

    def report() -> None:
        nonlocal has_value
        for epoch, value in iter_evaluations(tail, metric):
            has_value = True
            tune.report({EPOCH: epoch, metric: worst if math.isnan(value) else value, VALUE: value})

    def fail(message: str) -> NoReturn:
        record.keep(folder, failure=message)
        raise TrialFailed(message)

    report()
    while path.is_file() and journal.is_open(path):  # by the process of an earlier session
        if time.monotonic() > deadline:
            raise TrialFailed(f"it is still running in {journal.describe_writer(path)}")
        time.sleep(LOOK_S)
    if state_of(folder)[0] in ENDED:
        return
    record.keep(folder)
    process = start_process(plan, record)
    try:
        while process.poll() is None:
            report()
            time.sleep(LOOK_S)
        report()
    finally:
        process.stdin.close()  # type: ignore[union-attr] # a pipe, at whose end the trial ends
    (state, message), code = state_of(folder), process.returncode
    if state in ENDED and not has_value:
        fail(f"it ended without a value of {metric}. Give the data a validation set")
    if state in ENDED:
        return
    if code < 0:
        message = f"its process was killed{' (out of memory?)' if code == -9 else f' by signal {-code}'}"
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM) or (state == "interrupted" and code < 0):
        raise TrialFailed(message)  # a resumed sweep continues it
    lines = (folder / OUTPUT_NAME).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1].strip().removeprefix("error: ") if lines else f"its process ended with exit code {code}"
    if code == ResourceError.exit_code and plan.shares_cluster:  # other jobs may have what it lacked
        record.keep(folder, lacked=said)
        raise TrialFailed(said)
    fail(said if state != "failed" and code > 0 else message)  # an interrupted session has its own end in the journal


def start_process(plan: SweepPlan, record: Record) -> "subprocess.Popen[bytes]":
    """Start the process of a trial with the GPUs that Ray has assigned to this one; it ends with its standard input."""
    kept = {*plan.variables, "CUDA_VISIBLE_DEVICES"} - {"RAY_ADDRESS"}  # parallel.address says it
    with (plan.folder / name_folder(record.number) / OUTPUT_NAME).open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - this module
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=plan.cwd,
            env={name: value for name, value in os.environ.items() if name in kept},
            start_new_session=True,  # Ctrl-C is for the sweep, which then stops its trials
        )
    assert process.stdin is not None  # it was asked for
    with suppress(BrokenPipeError):  # the process has ended, which is looked at next
        pickle.dump((plan, record), process.stdin)
        process.stdin.flush()
    return process


def stop_trials(*, grace_s: float, tell: Callable[[str], None]) -> None:
    """Ask all trials to save and end; kill them after ``grace_s``, or at Ctrl-C."""
    trials = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if MODULE in process.cmdline():
                process.terminate()
                trials.append(process)
    if trials:
        tell(f"stopping {counted(len(trials), 'training')} after a checkpoint. To kill them, press Ctrl-C again.")
    try:
        psutil.wait_procs(trials, timeout=grace_s)
    finally:
        for process in trials:
            kill_tree(process.pid)


def send_rest(sweep: Path, *, patience_s: float, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Send the results that trials could not send, e.g. within a minute, until the store refuses some."""
    begin_stage("waiting until the trainings have ended")
    deadline = time.monotonic() + patience_s
    while any(map(_is_open, trials_of(sweep))) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    end_stage()
    waiting = [folder for folder in find_undelivered(sweep) if not _is_open(folder)]
    if waiting:
        tell(f"sending the results of {name_folders(waiting)} that MLflow lacks")
    for folder in waiting:
        try:
            if not sync(folder, warn=warn).delivered:
                return
        except PipelineError as error:  # e.g. a damaged journal; other trials can still be sent
            warn(str(error))


def find_undelivered(sweep: Path) -> list[Path]:
    """Return the folders of the trials whose results the tracking store lacks."""
    outcomes = {folder: TrackingOutcome.read(folder) for folder in trials_of(sweep) if has_begun(folder)}
    return [folder for folder, outcome in outcomes.items() if outcome is None or not outcome.delivered]


def _is_open(folder: Path) -> bool:
    return journal.is_open(folder / journal.FILE_NAME)


def name_folders(folders: Sequence[Path]) -> str:
    """Count the trials of these folders, and name them."""
    return f"{counted(len(folders), 'training')} ({', '.join(folder.name for folder in folders)})"


def main() -> NoReturn:
    """Run the trial of standard input, a pickled `SweepPlan` and `Record`, resumed if it was started before.

    The end of standard input means that Ray Tune stopped the trial, or that the parent process is gone: then it saves a
    checkpoint and ends. The exit code is that of ``pipeline run``.
    """
    signal.signal(signal.SIGTERM, terminate)
    plan, record = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    folder = plan.folder / name_folder(record.number)

    def end_with_parent() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock Python needs to end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="lifeline", daemon=True).start()
    code = 0
    try:
        with importable(Path.cwd()), huge_pages():
            with undisturbed():
                from pipeline.commands import run
            from pipeline.drive.recorded_run import Membership
            from pipeline.record.screen import Terminal

            run.run(
                plan.file.vary(record.values),
                with_baseline=False,
                verbose=plan.verbose,
                terminal=Terminal.of(quiet=True),
                resume=str(folder) if has_begun(folder) else None,
                member=Membership(
                    folder=folder,
                    title=record.title,
                    interruption=lambda: Record.read(folder).early_stop,
                    logs_model=plan.logs_models,
                    shares_cluster=plan.shares_cluster,
                ),
            )
    except PipelineError as error:
        say(error.told, err=True)
        code = error.exit_code
    except Terminated:
        code = 143
    exit_in_time(code)


if __name__ == "__main__":
    main()
