"""Ray Tune run of a sweep: which trial is next, how many run concurrently, which are stopped early."""

import threading
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from pipeline.commands.sweep.assignment import Suggestion, TrialJob
from pipeline.commands.sweep.planning import SweepPlan
from pipeline.commands.sweep.supervisor import EPOCH, SUGGESTION, Supervisor
from pipeline.config.sweep import Sweep
from pipeline.system.process import environment

_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one isn't silent at verbosity 0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are in the trials' own runs
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # sweeps resume from journals
    "TUNE_WARN_THRESHOLD_S": "60",
}


class Watcher(Protocol):
    """Listener to the trials, called in the thread that Ray Tune runs in."""

    def began(self, suggestion: Suggestion) -> None:
        """Note that a trial starts, or that it has ended in an earlier session."""

    def evaluated(self, suggestion: Suggestion, *, epoch: int, value: float) -> None:
        """Note an evaluation of a trial."""

    def ended(self, suggestion: Suggestion) -> None:
        """Note the end of a trial, failed or not."""


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


class _Callback(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Tune callback that passes events on to a `Watcher`."""

    def __init__(self, watcher: Watcher, halt: Halt, *, metric: str) -> None:
        self._watcher = watcher
        self._halt = halt
        self._metric = metric

    def __getstate__(self) -> dict[str, Any]:
        """Save nothing: sweeps resume from journals, not from Tune's files."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Block if asked to."""
        self._halt.obey()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass the start on."""
        self._watcher.began(_suggestion(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Pass an evaluation on; Tune reports the last one twice."""
        self._halt.obey()
        if trial.last_result.get(EPOCH) != result[EPOCH]:
            self._watcher.evaluated(_suggestion(trial), epoch=result[EPOCH], value=result[self._metric])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass the end on."""
        self._watcher.ended(_suggestion(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass the end on."""
        self._watcher.ended(_suggestion(trial))


def search(plan: SweepPlan, searcher: Searcher, *, job: TrialJob, watcher: Watcher, halt: Halt) -> None:
    """Run all trials of a sweep, with a local Ray connected.

    Args:
        plan: the sweep's plan.
        searcher: suggests the trials' values.
        job: settings shared by the trials.
        watcher: gets the trials' events.
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
                callbacks=[_Callback(watcher, halt, metric=job.metric)],
            ),
        )
        _fit(tuner, halt)


def _fit(tuner: tune.Tuner, halt: Halt) -> None:
    """Run the tuner in a thread; in the main thread Ray would handle Ctrl-C itself."""
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            tuner.fit()
        except SystemExit:
            return
        except BaseException as error:  # noqa: BLE001 - it is raised again in the main thread
            errors.append(error)

    thread = threading.Thread(target=fit, name="ray-tune", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)  # a signal is handled between two of these
    except BaseException:
        halt.ask()
        raise
    if errors:
        raise errors[0]


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


def _suggestion(trial: Any) -> Suggestion:
    return Suggestion.model_validate_json(trial.config[SUGGESTION])
