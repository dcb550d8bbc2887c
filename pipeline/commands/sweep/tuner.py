"""Ray Tune run of a sweep: which trial is next, how many run concurrently, which are stopped early."""

import math
import threading
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from pipeline.cluster.connection import outside_main_thread
from pipeline.commands.invocation import Invocation
from pipeline.commands.sweep.assignment import Record, TrialJob, folder_name
from pipeline.commands.sweep.journals import reached
from pipeline.commands.sweep.planning import SweepPlan
from pipeline.commands.sweep.supervisor import EPOCH, SUGGESTION, VALUE, Supervisor
from pipeline.commands.sweep.sweep_progress import SweepProgress, is_live
from pipeline.commands.sweep.sweep_report import trial as swept_trial
from pipeline.config.sweep import Sweep
from pipeline.recording.terminal import write
from pipeline.report.swept import LEFT, State, SweptTrial, assigned, figure
from pipeline.system import stages
from pipeline.system.process import environment

_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one isn't silent at verbosity 0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are in the trials' own runs
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # sweeps resume from journals
    "TUNE_WARN_THRESHOLD_S": "60",
}


class Halt:
    """Block on Ray Tune's thread when a sweep is interrupted, so that it starts no trial and stops none early."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._over = threading.Event()

    def ask(self) -> None:
        """Ask the thread to block."""
        self._asked.set()

    def end(self) -> None:
        """End the thread, after Ray has ended."""
        self._over.set()

    def obey(self) -> None:
        """Block if asked to; called by Tune's thread repeatedly."""
        if self._asked.is_set():
            self._over.wait()
            raise SystemExit  # ends a thread without a word


class SweepDisplay(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Progress of a sweep in the terminal, and its best value so far in the tracking store.

    Ray Tune calls it in the thread that it runs in.
    """

    def __init__(self, plan: SweepPlan, invocation: Invocation, halt: Halt, *, end_search: Callable[[], None]) -> None:
        """Call ``end_search`` when the cluster has no room for any trial."""
        self.lacked = ""
        """Resources that the cluster lacked for a trial while no trial trained. Empty if it lacked none."""
        self._end_search = end_search
        self._plan = plan
        self._invocation = invocation
        self._terminal = invocation.terminal
        self._halt = halt
        self._best: dict[str, float] = {}
        self._over: set[int] = set()
        """Trials that had ended in an earlier session."""
        self.progress = SweepProgress(
            total=plan.sweep.total,
            epochs=plan.epochs,
            metric=plan.sweep.metric,
            direction=plan.direction,
            slots=plan.concurrent,
        )
        """Progress of the sweep as a whole."""
        self._is_live = is_live(self._terminal.progress)

    def __getstate__(self) -> dict[str, Any]:
        """Save nothing: sweeps resume from journals, not from Tune's files."""
        return {}

    def tell(self, message: str) -> None:
        """Print a message on its own line."""
        stages.end()
        write(self._terminal.progress, message)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Block if asked to."""
        self._halt.obey()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tell that a trial begins, unless it ended in an earlier session."""
        suggestion, found = self._found(trial)
        if found.state in ("finished", "stopped early"):
            self._over.add(suggestion.number)
            return
        self.progress.begin(suggestion.number, suggestion.values, epochs=found.epochs)
        again = f", resumed after epoch {found.epochs}" if found.epochs else ""
        if not self._is_live:  # the bar has a line for it
            self.tell(f"starting {suggestion.title}{again}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Tell an evaluation; Tune reports the last one twice."""
        self._halt.obey()
        number, metric = _suggestion(trial).number, self._plan.sweep.metric
        if trial.last_result.get(EPOCH) == result[EPOCH] or number in self._over:
            return
        self.progress.evaluated(number, epoch=result[EPOCH], value=result[VALUE])
        if not self._is_live:
            self.tell(f"trial {number}: epoch {result[EPOCH]}, {metric} {figure(result[VALUE])}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tell the end of a trial."""
        suggestion, found = self._found(trial)
        state: State = "stopped early" if found.state == "running" else found.state  # it writes its checkpoint yet
        self._tell_end(suggestion, found, state=state)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Tell the end of a trial that failed, or whose actor Ray has lost."""
        suggestion, found = self._found(trial)
        record = Record.read(self._invocation.folder / folder_name(found.number))
        if record is not None and record.lacked:
            self.lacked = record.lacked
            self._end_search()
            found = found.model_copy(update={"state": "interrupted"})
        elif found.state in (*LEFT, "running"):  # the trial ends as its supervisor is gone
            found = found.model_copy(update={"state": "interrupted", "message": "Ray lost the process that ran it"})
        self._tell_end(suggestion, found, state=found.state)

    def _tell_end(self, suggestion: Record, found: SweptTrial, *, state: State) -> None:
        is_earlier, is_bad = suggestion.number in self._over, state in ("failed", "interrupted")
        self.progress.end(suggestion.number, state, value=found.value, is_earlier=is_earlier)
        why = f": {found.message}" if is_bad else ""
        write(
            self._terminal.warnings if is_bad else self._terminal.progress,
            f"trial {suggestion.number}: {state}{' before' if is_earlier else ''}{why}; {self._so_far(found)}",
        )
        if found.state == "finished" and found.value is not None:
            self._note(found, value=found.value)

    def _so_far(self, found: SweptTrial) -> str:
        """Return what the bar doesn't tell: on a terminal the trial's own result, else the progress of the sweep."""
        if not self._is_live:
            return self.progress.line
        value = f"{self._plan.sweep.metric} {figure(found.value)} after epoch {found.epochs}, " if found.epochs else ""
        return f"{value}{assigned(found.values)}"

    def _found(self, trial: Any) -> tuple[Record, SweptTrial]:
        suggestion = _suggestion(trial)
        return suggestion, swept_trial(self._invocation.folder, suggestion, metric=self._plan.sweep.metric)

    def _note(self, found: SweptTrial, *, value: float) -> None:
        """Record what the best trial so far reached, by the number of trials that have ended."""
        metric, better = self._plan.sweep.metric, min if self._plan.direction == "min" else max
        if math.isnan(value):
            return
        if metric not in self._best or better(value, self._best[metric]) != self._best[metric]:
            self._best = {**reached(self._invocation.folder / folder_name(found.number)), metric: value}
        ended = len(self.progress.ended)
        self._invocation.log(self._best, step=ended, epoch=ended)


def search(plan: SweepPlan, searcher: Searcher, *, job: TrialJob, display: SweepDisplay, halt: Halt) -> None:
    """Run all trials of a sweep, with a local Ray connected.

    Args:
        plan: the sweep's plan.
        searcher: suggests the trials' values.
        job: settings shared by the trials.
        display: gets the trials' events.
        halt: asked to block if this ends with an exception.
    """
    sweep = plan.sweep
    supervisor = tune.with_parameters(Supervisor, job=job.model_dump_json(), direction=plan.direction)
    with environment(**_SETTINGS), TemporaryDirectory(prefix="pipeline-sweep-") as folder:
        tuner = tune.Tuner(
            tune.with_resources(supervisor, plan.resources),
            tune_config=tune.TuneConfig(
                metric=job.metric,
                mode=plan.direction,
                search_alg=searcher,
                scheduler=_scheduler(sweep, epochs=plan.epochs),
                num_samples=sweep.total,
                max_concurrent_trials=plan.concurrent,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=folder,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trials keep their own
                callbacks=[display],
            ),
        )
        error = outside_main_thread(tuner.fit, name="ray-tune", interrupt=halt.ask, patience_s=0)
    if error is not None and not isinstance(error, SystemExit):
        raise error


def _scheduler(sweep: Sweep, *, epochs: int) -> TrialScheduler:
    if sweep.asha is None:
        return FIFOScheduler()
    return ASHAScheduler(
        time_attr=EPOCH,
        max_t=epochs,
        grace_period=sweep.asha.grace_epochs,
        reduction_factor=sweep.asha.reduction_factor,
        stop_last_trials=False,  # a trial that has got that far ends by itself, with its checkpoint and its report
    )


def _suggestion(trial: Any) -> Record:
    return Record.model_validate_json(trial.config[SUGGESTION])
