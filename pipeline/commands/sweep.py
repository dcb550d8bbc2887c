"""``pipeline sweep``: plan the trials, let Ray Tune run and stop them, and end in the best one.

Each trial is an ordinary run in a process of its own, see `pipeline.commands.sweep_trial`. A sweep continues from their
journals. docs/design.md says why.
"""

import itertools
import shlex
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from pipeline.commands.invocation import Invocation, invoked, planning, refuse_outer_launcher
from pipeline.commands.sweep_trial import (
    CPUS,
    ENDED,
    EPOCH,
    VALUE,
    Record,
    SweepPlan,
    SweptTrial,
    best_of,
    describe_device,
    find_concurrency,
    find_trial,
    find_trials,
    find_undelivered,
    find_value,
    name_folder,
    name_folders,
    send_rest,
    sort_trials,
    state_of,
    stop_trials,
    train_trial,
)
from pipeline.drive.checkpoints import direction_of, judges
from pipeline.drive.resume import check_same, earlier
from pipeline.errors import Problem, ResourceError, TrainingError, UsageError, refusals
from pipeline.experiment.load import ExperimentFile, override
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.sweep import Parameter, Sweep
from pipeline.experiment.targets import install_command
from pipeline.experiment.uris import without_credentials_in
from pipeline.launch.cluster import connected, outside_main_thread
from pipeline.plan.plan import make_plan
from pipeline.protocol.events import Finished, ModelSaved, Tagged
from pipeline.record import journal
from pipeline.record.folder import EXPERIMENT_NAME, id_of
from pipeline.record.screen import Terminal, write
from pipeline.results import texts
from pipeline.results.record import Fact, Result, Table
from pipeline.system import begin_stage, end_stage, environment
from pipeline.wording import counted, figure

_MAY_CHANGE = ("sweep.trials", "sweep.concurrent", "loader.", "tracking.", "benchmark.", "parallel.")
_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one isn't silent at verbosity 0
    "RAY_kill_child_processes_on_worker_exit": "0",  # a trial that is stopped saves a checkpoint before it ends
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are in the trials' own runs
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # sweeps resume from journals
    "TUNE_WARN_THRESHOLD_S": "60",
}
_PATIENCE_S, _LINE_S = 5.0, 10.0
"""Seconds that Ray Tune's thread has to end when a sweep is interrupted, and between two lines of progress."""


def make(file: ExperimentFile) -> SweepPlan:
    """Check the file and all values of its sweep, and plan the trials; for the errors see `planning`."""
    sweep, parallel, common = file.experiment.sweep, file.experiment.parallel, dict[str, Any]()
    if sweep is None:
        example = "sweep: {parameters: {optimizer.lr: {log_uniform: [1e-4, 1e-1]}}, trials: 8}"
        raise file.explain([Problem("sweep", f"missing. Write the values to try, e.g. {example}")])
    if parallel.is_elastic:
        message = f"is {list(parallel.worker_counts)}. Trials share the machine, so use one number."
        raise file.explain([Problem("parallel.workers", message)])
    with planning(file) as (allowed, resources):
        known = judges(file.experiment, allowed=allowed)
        direction = direction_of(sweep.metric, sweep.mode, key="sweep.metric", judges=known)
        concurrent, cpus = find_concurrency(file, resources, allowed=allowed, total=sweep.total, asked=sweep.concurrent)
        common[CPUS] = cpus
        if parallel.launcher == "ray" and parallel.cluster is not None:
            common["parallel.address"] = parallel.cluster  # RAY_ADDRESS may be where it stands
        varied = file.vary(common)
        plan = make_plan(varied.experiment, resources, allowed=allowed, with_baseline=False)
    totals = {"CPU": resources.cpus, "GPU": len(resources.gpus)}
    free = {name: sum(node.get(name, 0) for node in resources.idle) for name in totals}
    parts = ", ".join(f"{free[name]:g} of {total} {name}" for name, total in totals.items() if total)
    most = (
        f"so at most {counted(concurrent, 'training')} at a time; each waits for room. For more, set sweep.concurrent."
    )
    is_busy = resources.idle and any(free[name] < total for name, total in totals.items())
    busy = [f"{resources.node}: {parts} free now, {most}"] if is_busy else []
    seed = file.experiment.seed if sweep.seed is None else sweep.seed
    drawn = draws(sweep, seed=seed) if sweep.search == "random" else ()
    records = tuple(Record(number=number, values=values) for number, values in enumerate(drawn, 1))
    wrong = [
        Problem("sweep.parameters", f"{each.title}: {problem.key}: {problem.message}")
        for each in records
        for problem in refusals(partial(file.vary, each.values))
    ]
    if wrong:
        raise file.explain(wrong)
    epochs = sweep.parameters.get("train.epochs")
    return SweepPlan(
        sweep=sweep,
        direction=direction,
        file=varied,
        concurrent=concurrent,
        seed=seed,
        records=records,
        epochs=max(epochs.candidates) if epochs else file.experiment.train.epochs or 0,
        logs_models="tracking.log_model" in file.places.entries and file.experiment.tracking.log_model,
        plan=plan.model_copy(update={"command": "sweep", "experiment": file.experiment, "notes": (*plan.notes, *busy)}),
    )


def describe(plan: SweepPlan) -> str:
    """Describe a plan in lines."""
    trial, sweep = plan.plan.main, plan.sweep
    asha = f"; ASHA continues 1 in {sweep.asha.reduction_factor} trials" if sweep.asha else ""
    each = f"each {trial.title} with {trial.launcher}, {describe_device(trial)}"
    is_product = sweep.combinations > 1 and sweep.trials > 1
    product = f" ({sweep.trials} draws x {sweep.combinations} combinations of the grids)" if is_product else ""
    good = "lower is better" if plan.direction == "min" else "higher is better"
    lines = [
        f"sweep        {counted(sweep.total, 'trial')}{product}, ranked by {sweep.metric} ({good})",
        *(f"             {key}: {parameter}" for key, parameter in sweep.parameters.items()),
        f"search       {sweep.search}, seed {plan.seed}{asha}",
        f"machine      {plan.plan.resources.summary}",
        f"concurrent   {counted(plan.concurrent, 'trial')}, {each}",
        f"tracking     {plan.plan.experiment.tracking.uri}",
    ]
    return "\n".join([*lines, *(f"  {each.title}" for each in plan.records)])


def draws(sweep: Sweep, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the values of all trials: for each draw, all combinations of the grids, the last grid varying fastest.

    They are a pure function of the seed, the number of the draw, and the key: a larger ``sweep.trials`` appends trials
    without changing earlier ones.
    """
    grids = sweep.grids
    spaces = {key: find_space(one) for key, one in sweep.parameters.items() if key not in grids}
    for draw in range(sweep.trials):
        seeds = {key: zlib.crc32(f"{seed}/{draw}/{key}".encode()) for key in spaces}
        drawn = {key: find_value(sweep.parameters[key], spaces[key].sample(random_state=seeds[key])) for key in spaces}
        for combination in itertools.product(*grids.values()):
            values = {**drawn, **dict(zip(grids, combination, strict=True))}
            yield {key: values[key] for key in sweep.parameters}


def find_space(parameter: Parameter) -> Any:
    """Return what a parameter is for Ray Tune, which draws from a list by its index."""
    match parameter:
        case Parameter(uniform=(low, high)):
            return tune.uniform(low, high)
        case Parameter(log_uniform=(low, high)):
            return tune.loguniform(low, high)
        case Parameter(int_uniform=(low, high)):
            return tune.randint(low, high + 1)
        case Parameter(int_log_uniform=(low, high)):
            return tune.lograndint(low, high + 1)
    return tune.choice(range(len(parameter.choice or ())))


def make_searcher(plan: SweepPlan, begun: Sequence[SweptTrial]) -> Any:
    """Return Ray Tune's search with Optuna, after the trials that have begun in an earlier session."""
    try:
        import optuna
    except ImportError as error:
        raise ResourceError(
            f"sweep.search: optuna needs the package optuna ({error}). Install it: {install_command('optuna')}. "
            "Or write search: random."
        ) from None
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    lists = {key: list(one.choice) for key, one in plan.sweep.parameters.items() if one.choice is not None}
    points = [
        {key: lists[key].index(value) if key in lists else value for key, value in trial.values.items()}
        for trial in begun
    ]
    return OptunaSearch(
        metric=plan.sweep.metric,
        mode=plan.direction,
        points_to_evaluate=points or None,
        seed=plan.seed + len(points),  # the same seed again would draw again what these were drawn from
    )


def sweep(
    file: ExperimentFile,
    *,
    resume: str | None,
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Result, Path], None] | None = None,
) -> None:
    """Train an experiment with several values concurrently and end in the best one."""
    refuse_outer_launcher("sweep")
    plan, before = make(file), None
    if resume is not None:
        state = earlier(file, resume, role="sweep")
        check_same(file, state, may_change=_MAY_CHANGE, remedy="start a new sweep without --resume")
        before, total = state.folder, plan.sweep.total
        if all(state_of(before / name_folder(number))[0] in ENDED for number in range(1, total + 1)):
            remedy = "Raise sweep.trials, or start a new sweep."
            raise UsageError(f"--resume: all {total} trials of {before} have ended. {remedy}")
    with invoked(
        plan.plan, file=file, terminal=terminal, verbose=verbose, folder=before, again=("sweep",), show=show
    ) as invocation:
        folder = invocation.folder
        plan = replace(plan, folder=folder.absolute(), verbose=verbose)
        try:
            _search(plan, invocation)
            send_rest(folder, patience_s=plan.grace_s, tell=partial(write, terminal.progress), warn=invocation.warn)
        finally:
            trials = find_trials(plan)
            _finish(trials, plan, invocation)
            if missing := find_undelivered(folder):
                invocation.warn(
                    f"results of {name_folders(missing)} are missing in MLflow. Send them: pipeline sync {folder}"
                )
    failed = [trial for trial in trials if trial.state == "failed"]
    if failed and len(failed) == len(trials):
        raise TrainingError(f"all {len(failed)} trials failed. The first error: {failed[0].message}")
    if left := [trial for trial in trials if trial.state not in (*ENDED, "failed")]:
        numbers = ", ".join(str(trial.number) for trial in left)
        message = f"trials that did not end: {numbers}. To continue them, use --resume."
        lacked = next(filter(None, (Record.read(folder / name_folder(trial.number)).lacked for trial in left)), "")
        raise ResourceError(f"{message} Cause: {lacked}") if lacked else TrainingError(message)


class Display(tune.Callback):  # type: ignore[misc]  # Ray has no types
    """Progress of a sweep, in Ray Tune's thread: a line when a trial has ended, and every ten seconds if it differs."""

    def __init__(self, plan: SweepPlan, invocation: Invocation) -> None:
        self.stops = threading.Event()  # ends Tune's thread at its next step: it starts no trial and stops none early
        self._plan, self._invocation, self._told, self._told_at = plan, invocation, "", time.monotonic()
        self._known = [each for each in find_trials(plan) if each.state in ENDED]

    def __getstate__(self) -> dict[str, Any]:
        return {}  # saved by Tune, for nothing: sweeps resume from journals

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """End the thread if asked to."""
        if self.stops.is_set():
            raise SystemExit  # ends a thread without a word
        line = self._describe(trials)
        if time.monotonic() > self._told_at + _LINE_S and line != self._told:
            self._told, self._told_at = line, time.monotonic()
            write(self._invocation.terminal.progress, line)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note the end of a trial; Tune has stopped it early if its process runs, or is to be resumed."""
        found, folder = self._find(trial)
        if found.state in ("running", "interrupted"):
            Record.read(folder).keep(folder, stopped_after=trial.last_result[EPOCH])
            found = found._replace(state="stopped early")
        if found.number in (one.number for one in self._known):  # it ended in an earlier session
            return
        self._tell_end(found, trials, trial)
        self._known.append(found)
        if best_of(self._known, self._plan.direction) == found:
            events = journal.marked(folder / journal.FILE_NAME, "finished")
            metrics = [event for event in events if isinstance(event, Finished)][-1].result.metrics
            own = {name: one for name, one in metrics.items() if name == "train/loss" or name.startswith(PREFIX)}
            self._invocation.log(own, step=len(self._known), epoch=len(self._known))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note the end of a trial that failed, that found no room, or whose actor Ray has lost."""
        found, folder = self._find(trial)
        lacked = Record.read(folder).lacked
        if found.state != "failed" and not lacked:  # the trial ends as its actor is gone
            found = found._replace(state="interrupted", message="Ray lost the process that ran it")
        self._tell_end(found, trials, trial)
        if lacked and not any(one.status == one.RUNNING for one in trials if one is not trial):
            self.stops.set()  # each other trial would wait as long

    def _find(self, trial: Any) -> tuple[SweptTrial, Path]:
        folder = self._plan.folder / str(trial)
        record = Record.read(folder).model_copy(update={"number": int(str(trial)[6:])})
        return find_trial(self._plan.folder, record, metric=self._plan.sweep.metric), folder

    def _tell_end(self, found: SweptTrial, trials: list[Any], trial: Any) -> None:
        is_bad, terminal = found.state not in ENDED, self._invocation.terminal
        value = f"{self._plan.sweep.metric} {figure(found.value or 0.0)} after {counted(found.epochs, 'epoch')}"
        parts = [found.state, *([found.message] if is_bad else []), *([value] if found.value is not None else [])]
        line = f"trial {found.number}: {': '.join(parts)}; {self._describe(trials, trial)}"
        write(terminal.warnings if is_bad else terminal.progress, line)

    def _describe(self, trials: list[Any], ended: Any = None) -> str:
        running = sum(one.status == one.RUNNING for one in trials if one is not ended)
        done = sum(one is ended or one.is_finished() for one in trials)
        known = {
            int(str(one)[6:]): one.last_result for one in trials if VALUE in one.last_result and one.status != one.ERROR
        }
        pick = min if self._plan.direction == "min" else max
        best = pick(known, key=lambda number: known[number][self._plan.sweep.metric]) if known else 0
        value = f"; best so far: {figure(known[best][VALUE])} in trial {best}" if best else ""
        return f"{done} of {self._plan.sweep.total} trials ended, {running} running{value}"


def _search(plan: SweepPlan, invocation: Invocation) -> None:
    """Let Ray Tune run the trials to their end. Stop trials that an error or Ctrl-C leaves."""
    asha, numbers = plan.sweep.asha, iter(range(1, plan.sweep.total + 1))
    scheduler = asha and ASHAScheduler(
        time_attr=EPOCH,
        max_t=plan.epochs,
        grace_period=asha.grace_epochs,
        reduction_factor=asha.reduction_factor,
        stop_last_trials=False,  # a trial that has got that far ends by itself, with its checkpoint and its report
    )
    searcher = None if plan.records else make_searcher(plan, find_trials(plan))
    space = None if plan.records else {key: find_space(one) for key, one in plan.sweep.parameters.items()}
    display = Display(plan, invocation)
    trial = plan.plan.main
    amounts = {"CPU": trial.workers * trial.cpus_per_worker, "GPU": trial.workers * trial.devices_per_worker}
    needs: dict[str, float] = {name: amount for name, amount in amounts.items() if amount}
    if plan.shares_cluster:  # where the workers run; Ray wants something to be asked for
        needs = {"node:__internal_head__": 1e-4}
    begin_stage("starting Ray")
    with environment(**_SETTINGS), connected(None, verbose=plan.verbose), TemporaryDirectory() as storage:
        end_stage()
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(train_trial, plan=plan), needs),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=plan.sweep.metric,
                mode=plan.direction,
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=plan.sweep.total,
                max_concurrent_trials=plan.concurrent,
                trial_name_creator=lambda _: name_folder(next(numbers)),
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=tune.RunConfig(name="tune", storage_path=storage, verbose=0, callbacks=[display]),
        )
        try:
            stop = display.stops.set
            error = outside_main_thread(tuner.fit, name="ray-tune", interrupt=stop, patience_s=_PATIENCE_S)
        except BaseException as interrupted:  # noqa: BLE001 - raised below
            error = interrupted
        if error is not None and not isinstance(error, SystemExit):
            stop_trials(grace_s=plan.grace_s, tell=partial(write, invocation.terminal.progress))
            raise error


def _finish(trials: Sequence[SweptTrial], plan: SweepPlan, invocation: Invocation) -> None:
    """Tag the trials, send the best one's model, and end in the result."""
    best, tracking = best_of(trials, plan.direction), plan.plan.experiment.tracking
    model = None
    if best is not None and tracking.log_model and (tracking.register_model is not None or not plan.logs_models):
        saved = journal.marked(plan.folder / name_folder(best.number) / journal.FILE_NAME, "model_saved")
        model = next((event for event in reversed([*saved]) if isinstance(event, ModelSaved)), None)
    receive, run = invocation.recorder.receive, id_of(plan.folder)
    for one in trials:  # tags replace those of an earlier session
        if one.state == "completed":
            receive(Tagged(run=f"{run}/{name_folder(one.number)}", tags={"best": str(one == best).lower()}))
        elif one.state == "stopped early":
            receive(Tagged(run=f"{run}/{name_folder(one.number)}", tags={"stopped_early": one.message}))
    states = Counter(one.state for one in trials)
    tags = {"trials": ", ".join(f"{count} {state}" for state, count in states.items())}
    if best is not None:
        tags |= {"best_run": f"{run}/{name_folder(best.number)}"}
        tags |= {f"best.{key}": str(value) for key, value in best.values.items()}
        tags |= {f"best.{plan.sweep.metric}": figure(best.value or 0.0)}
    receive(Tagged(run=run, tags=tags))
    if model is not None:
        receive(model.model_copy(update={"time": time.time(), "run": tags["best_run"]}))
    invocation.finish(make_result(trials, plan, invocation, logs_model=model is not None))


def make_result(trials: Sequence[SweptTrial], plan: SweepPlan, invocation: Invocation, *, logs_model: bool) -> Result:
    """Return the result: the best trial, a table of all by their values, and the commands to go on with."""
    metric, total, file = plan.sweep.metric, plan.sweep.total, invocation.file
    states, best = Counter(one.state for one in trials), best_of(trials, plan.direction)
    ended, early = states["completed"] + states["stopped early"], states["stopped early"]
    title = [texts.SWEPT.format(name=file.experiment.name, of=f"{ended} of {counted(total, 'trial')}")]
    title += [texts.STOPPED_BY_ASHA.format(count=early)] if early else []
    title += [f"{count} {state}" for state, count in states.items() if state not in ENDED]
    keys = list(plan.sweep.parameters)
    short = [key.rpartition(".")[2] for key in keys]
    names = short if len({*short}) == len(keys) else keys
    rows = [
        (
            str(one.number),
            Fact(key=metric, value=one.value, trial=name_folder(one.number)),
            str(one.epochs or "-"),
            one.state,
            *(_show(one.values.get(key)) for key in keys),
        )
        for one in sort_trials(trials, plan.direction)
    ]
    left = total - ended - states["failed"]
    steps = [("RESUME", texts.TRIALS_LEFT.format(left=left, total=total))] if left else []
    why = texts.ALL_NAN.format(metric=metric) if states["completed"] else texts.NONE_COMPLETED
    headline, facts = [why], list[Fact]()
    if best is not None:
        values = [(name, _show(best.values[key])) for name, key in zip(names, keys, strict=True)]
        about = {"number": best.number, "total": total, "metric": metric, "value": figure(best.value or 0.0)}
        headline = [texts.BEST.format(**about, epochs=counted(best.epochs, "epoch"))]
        headline += [", ".join(f"{name} {value}" for name, value in values)]
        headline += [texts.ITS_MODEL] if logs_model else []
        why = texts.BEST_IN_A_LINE.format(**about, values=", ".join(f"{name}={value}" for name, value in values))
        facts += [Fact(key=metric, value=best.value), Fact(key="best_trial", value=best.number, label="best trial")]
        given = [word for word in file.overrides if word.partition("=")[0] not in best.values]
        words = [without_credentials_in(word) for word in given if not word.startswith(("sweep.", "sweep="))]
        words = [str(file.path), *words, *(override(key, value) for key, value in best.values.items())]
        steps += [("RETRAIN", shlex.join(["pipeline", "run", *words])), *_confirm(trials, plan, invocation)]
    return Result(
        kind="sweep",
        name=file.experiment.name,
        title=", ".join(title),
        hardware=invocation.hardware,
        label="RESULT" if best is None else "BEST",
        headline=tuple(headline),
        verdict=why,
        facts=(*facts, Fact(key="trials", value=total), Fact(key="trials_failed", value=states["failed"])),
        tables=(
            Table(
                header=("trial", metric, "epochs", "status", *names),
                rows=tuple(rows),
                emphasis=None if best is None else 0,
                notes=(texts.LAST_VALUES.format(metric=metric),),
            ),
        ),
        next=tuple(steps),
        notes=tuple(
            texts.TRIAL_FAILED.format(number=one.number, message=one.message) for one in trials if one.state == "failed"
        ),
    )


def _confirm(trials: Sequence[SweptTrial], plan: SweepPlan, invocation: Invocation) -> Iterator[tuple[str, str]]:
    """Yield the command that compares the second best settings with the best ones, if two completed.

    It uses new seeds, since the best of many trials was partly lucky.
    """
    ended = [one for one in sort_trials(trials, plan.direction) if one.state == "completed" and one.value is not None]
    settings = [{key: value for key, value in one.values.items() if key != "seed"} for one in ended]
    other = next((one for one, values in zip(ended, settings, strict=True) if values != settings[0]), None)
    if other is not None:
        paths = [str(invocation.folder / name_folder(one.number) / EXPERIMENT_NAME) for one in (other, ended[0])]
        words = [f"seed={invocation.file.experiment.seed + 1}", "--seeds", "5"]
        words += ["--metric", plan.sweep.metric, "--mode", plan.direction]
        yield "CONFIRM", shlex.join(["pipeline", "compare", *paths, *words])


def _show(value: object) -> str:
    """Format a value of a parameter: of a component, or of a name of one, the name of its class."""
    if isinstance(value, Mapping):
        value = value.get("_target_", dict(value))
    if isinstance(value, str):
        return value.rpartition(".")[2]
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
