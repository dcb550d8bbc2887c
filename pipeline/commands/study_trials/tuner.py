"""Ray Tune run of a sweep: which trial is next, how many run concurrently, which are stopped early."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from pipeline.commands.invocation import Invocation
from pipeline.commands.study_trials import finish_trials
from pipeline.commands.study_trials.assignment import Record, TrialJob, folder_name
from pipeline.commands.study_trials.journals import best_of, find_trial, reached, records
from pipeline.commands.study_trials.planning import SweepPlan
from pipeline.commands.study_trials.supervisor import EPOCH, TRIAL, VALUE, Supervisor
from pipeline.commands.study_trials.sweep_progress import SweepProgress, is_live, shown_on
from pipeline.experiment.sweep import Sweep
from pipeline.launch.cluster import connected, outside_main_thread
from pipeline.record.screen import write
from pipeline.report.swept import LEFT, SweptTrial, assigned, figure
from pipeline.system import stages
from pipeline.system.process import environment

_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one isn't silent at verbosity 0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are in the trials' own runs
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # sweeps resume from journals
    "TUNE_WARN_THRESHOLD_S": "60",
}
_PATIENCE_S = 5.0
"""Seconds that Ray Tune's thread has to end when a sweep is interrupted."""


class SweepDisplay(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Progress of a sweep in the terminal, and its best value so far in the tracking store.

    Ray Tune calls it in the thread that it runs in.
    """

    def __init__(self, progress: SweepProgress, invocation: Invocation) -> None:
        self.progress = progress
        self.lacked = ""
        """Resources that the cluster lacked for a trial while no trial trained. Empty if it lacked none."""
        self.stops = threading.Event()
        """Set to end Ray Tune's thread at its next step, so that it starts no trial and stops none early."""
        self._invocation = invocation
        self._terminal = invocation.terminal
        self._is_live = is_live(self._terminal.progress)

    def __getstate__(self) -> dict[str, Any]:
        """Save nothing: sweeps resume from journals, not from Tune's files."""
        return {}

    def shown(self) -> AbstractContextManager[object]:
        """Show the progress while the block runs, on a terminal."""
        return shown_on(self._terminal.progress, self.progress)

    def tell(self, message: str) -> None:
        """Print a message on its own line."""
        stages.end()
        write(self._terminal.progress, message)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """End the thread if asked to."""
        if self.stops.is_set():
            raise SystemExit  # ends a thread without a word

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Print that a trial starts, unless it ended in an earlier session."""
        found = self._find(trial)
        if found.state in ("finished", "stopped early"):
            self.progress.update(found)
            return
        self.progress.update(found.model_copy(update={"state": "running"}))
        again = f", resumed after epoch {found.epochs}" if found.epochs else ""
        if not self._is_live and self.progress.is_search:  # the bar has a line for it
            self.tell(f"starting {_record(trial).title}{again}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Print an evaluation; Tune reports the last one twice."""
        number = _record(trial).number
        if trial.last_result.get(EPOCH) == result[EPOCH] or not self.progress.is_running(number):
            return
        self.progress.evaluated(number, epoch=result[EPOCH], value=result[VALUE])
        if not self._is_live and self.progress.is_search:
            value = f"{self.progress.metric} {figure(result[VALUE])}"
            self.tell(f"{self.progress.name_of(number)}: epoch {result[EPOCH]}, {value}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Print the end of a trial."""
        found = self._find(trial)
        if found.state in ("running", "interrupted"):  # it writes its checkpoint yet, or ended in an earlier session
            found = found.model_copy(update={"state": "stopped early"})
        self._end(found)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Print the end of a trial that failed, or whose actor Ray has lost."""
        found = self._find(trial)
        record = Record.read(self._invocation.folder / folder_name(found.number))
        if record is not None and record.lacked:
            self.lacked = record.lacked
            self.stops.set()
            found = found.model_copy(update={"state": "interrupted"})
        elif found.state in (*LEFT, "running"):  # the trial ends as its supervisor is gone
            found = found.model_copy(update={"state": "interrupted", "message": "Ray lost the process that ran it"})
        self._end(found)

    def _find(self, trial: Any) -> SweptTrial:
        return find_trial(self._invocation.folder, _record(trial), metric=self.progress.metric)

    def _end(self, found: SweptTrial) -> None:
        is_earlier, is_bad = not self.progress.is_running(found.number), found.state in ("failed", "interrupted")
        self.progress.update(found)
        why = f": {found.message}" if is_bad else ""
        write(
            self._terminal.warnings if is_bad else self._terminal.progress,
            f"{found.name}: {found.state}{' before' if is_earlier else ''}{why}; {self._describe(found)}",
        )
        if found.state == "finished" and not is_earlier and (estimate := self.progress.estimate):
            self.tell(estimate)
        ended = self.progress.ended_trials
        best = best_of(ended, self.progress.direction) if self.progress.is_search else None
        if found.state == "finished" and best is not None:
            values = reached(self._invocation.folder / folder_name(best.number))
            self._invocation.log(values, step=len(ended), epoch=len(ended))

    def _describe(self, found: SweptTrial) -> str:
        """Return what the bar doesn't show: on a terminal the trial's own result, else the progress of the sweep."""
        value = f"{self.progress.metric} {figure(found.value)} after epoch {found.epochs}" if found.epochs else ""
        if self.progress.is_search:
            return ", ".join(filter(None, [value, assigned(found.values)])) if self._is_live else self.progress.line
        return value if self._is_live else "; ".join(filter(None, [value, self.progress.line]))


def make_searcher(plan: SweepPlan, folder: Path) -> Searcher | None:
    """Return Ray Tune's search with Optuna, after the trials of an earlier session; None for values already drawn.

    Raises:
        ResourceError: Optuna is not installed.
    """
    if plan.sweep.search == "random":
        return None
    from pipeline.commands.study_trials.searchers import SweepSearch

    begun = [record.values for record in records(folder)]
    return SweepSearch(plan.sweep, begun, direction=plan.direction, seed=plan.seed)


Search = Callable[..., None]
"""Runs trials, see `searching`."""


@contextmanager
def searching(*, job: TrialJob, display: SweepDisplay) -> Iterator[Search]:
    """Start a local Ray for Tune; yield a function that runs trials to their end. Stop trials that an error leaves."""
    stages.begin("starting Ray")
    with connected(None, verbose=job.verbose), display.shown():
        try:
            yield partial(_search, job=job, display=display)
        except BaseException:
            finish_trials.stop(grace_s=job.grace_s, tell=display.tell)
            raise


def _search(
    records: Sequence[Record],
    *,
    needs: Callable[[Record], dict[str, float]],
    job: TrialJob,
    display: SweepDisplay,
    searcher: Searcher | None = None,
    samples: int = 1,
    scheduler: ASHAScheduler | None = None,
) -> None:
    """Run trials.

    Args:
        records: the trials; none with a searcher, which draws their values.
        needs: returns the resources of this machine that a trial needs.
        job: settings shared by the trials.
        display: gets the trials' events.
        searcher: see `make_searcher`.
        samples: number of trials of a searcher; 1 without one.
        scheduler: stops trials early.
    """
    drawn = [record.model_dump(include={"number", "values", "variant"}) for record in records]
    with environment(**_SETTINGS), TemporaryDirectory(prefix="pipeline-sweep-") as folder:
        trainable = tune.with_parameters(Supervisor, job=job)
        tuner = tune.Tuner(
            tune.with_resources(trainable, lambda config: needs(Record.model_validate(config[TRIAL]))),
            param_space={TRIAL: tune.grid_search(drawn)} if searcher is None else None,
            tune_config=tune.TuneConfig(
                metric=job.metric,
                mode=job.direction,
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=samples,
                max_concurrent_trials=display.progress.slots,
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
        error = outside_main_thread(tuner.fit, name="ray-tune", interrupt=display.stops.set, patience_s=_PATIENCE_S)
    if error is not None and not isinstance(error, SystemExit):
        raise error


def schedule(sweep: Sweep, *, epochs: int) -> ASHAScheduler | None:
    """Return the scheduler of a sweep's ``asha``; None without one."""
    if sweep.asha is None:
        return None
    return ASHAScheduler(
        time_attr=EPOCH,
        max_t=epochs,
        grace_period=sweep.asha.grace_epochs,
        reduction_factor=sweep.asha.reduction_factor,
        stop_last_trials=False,  # a trial that has got that far ends by itself, with its checkpoint and its report
    )


def _record(trial: Any) -> Record:
    return Record.model_validate(trial.config[TRIAL])
