"""Report of a sweep: the state of its trials, in the terminal, in files, in the tracking store."""

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import time

from pipeline.commands.invocation import Invocation
from pipeline.commands.study_trials.assignment import folder_name
from pipeline.commands.study_trials.journals import best_of, find_trial, model_of, records
from pipeline.commands.study_trials.planning import SweepPlan
from pipeline.experiment.load import ExperimentFile, override
from pipeline.experiment.sweep import Parameter
from pipeline.experiment.uris import without_credentials_in
from pipeline.protocol.events import ModelSaved, Tagged
from pipeline.record.folder import id_of
from pipeline.report.swept import CSV_NAME, FILE_NAME, Swept, SweptReport, SweptTrial, figure

_SEED = "seed"
_WIDE_RANGE = 30
"""Ratio of the largest to the smallest listed value from which a picture's axis is logarithmic."""


def report(plan: SweepPlan, invocation: Invocation) -> SweptReport:
    """Compare the trials in a report: printed, recorded, saved."""
    swept = _swept(invocation.file, plan, invocation.folder)
    model = _model_of_best(swept, invocation.folder, plan=plan)
    result = SweptReport(swept=swept, hardware=invocation.hardware, logs_model=model is not None)
    invocation.show(result, summary=result.markdown())
    for event in (*_tags(swept), *([model] if model else ())):
        invocation.recorder.receive(event)
    invocation.save({FILE_NAME: result.model_dump_json(indent=1) + "\n", CSV_NAME: result.to_csv()})
    return result


def _swept(file: ExperimentFile, plan: SweepPlan, folder: Path) -> Swept:
    sweep = plan.sweep
    trials = tuple(find_trial(folder, each, metric=sweep.metric) for each in plan.suggestions or records(folder))
    best = best_of(trials, plan.direction)
    swept = Swept(
        experiment=file.experiment.name,
        metric=sweep.metric,
        mode=plan.direction,
        search=sweep.search,
        seed=plan.seed,
        trials=trials,
        best=best.number if best else None,
        command=_command(file, best) if best else (),
        run=id_of(folder),
        log_scaled=tuple(key for key, one in sweep.parameters.items() if _is_logarithmic(one)),
    )
    return swept.model_copy(update={"confirmation": _confirmation(file, swept)})


def _is_logarithmic(parameter: Parameter) -> bool:
    """Return True for numbers that are drawn with a uniform logarithm, or listed over orders of magnitude."""
    listed = parameter.grid or parameter.choice or ()
    numbers = [
        value for value in listed if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    is_wide = len(numbers) == len(listed) > 0 and max(numbers) > _WIDE_RANGE * min(numbers)
    return is_wide or bool(parameter.log_uniform or parameter.int_log_uniform)


def _command(file: ExperimentFile, best: SweptTrial) -> tuple[str, ...]:
    """Return the command that trains the best trial again, quoted for a shell."""
    given = [word for word in file.overrides if not word.startswith(("sweep.", "sweep="))]
    given = [word for word in given if word.partition("=")[0] not in best.values]
    words = [*map(without_credentials_in, given), *(override(key, value) for key, value in best.values.items())]
    return ("pipeline", "run", *map(shlex.quote, (str(file.path), *words)))


def _confirmation(file: ExperimentFile, swept: Swept) -> tuple[str, ...]:
    """Return the command that compares the second best settings with the best ones, quoted for a shell.

    It uses new seeds, since the best of many trials was partly lucky. Empty if no two settings completed.
    """
    ended = [trial for trial in swept.by_merit if trial.state == "finished" and trial.value is not None]
    settings = [{key: value for key, value in trial.values.items() if key != _SEED} for trial in ended]
    other = next((values for values in settings if values != settings[0]), None)
    if swept.best is None or other is None:
        return ()
    best = settings[0]
    keys = [key for key in best if best[key] != other[key]]
    shared = [override(key, value) for key, value in best.items() if key not in keys]
    given = [word for word in file.overrides if not word.startswith(("sweep.", "sweep=", f"{_SEED}="))]
    given = [word for word in given if word.partition("=")[0] not in best]
    varied = [f"{override(key, other[key])},{override(key, best[key]).removeprefix(f'{key}=')}" for key in keys]
    words = [str(file.path), *map(without_credentials_in, given), *shared, f"{_SEED}={file.experiment.seed + 1}"]
    words += ["--vary", shlex.join(varied), "--seeds", "5", "--metric", swept.metric, "--mode", swept.mode]
    return ("pipeline", "compare", *map(shlex.quote, words))


def _model_of_best(swept: Swept, folder: Path, *, plan: SweepPlan) -> ModelSaved | None:
    """Return the best trial's model to send to the store, or to register; None if there is neither to do."""
    best, tracking = swept.trial(swept.best), plan.plan.experiment.tracking
    if best is None or not tracking.log_model or (plan.logs_models and tracking.register_model is None):
        return None
    saved = model_of(folder / folder_name(best.number))
    return saved.model_copy(update={"time": time(), "run": best.run}) if saved is not None else None


def _tags(swept: Swept) -> Iterator[Tagged]:
    """Yield tags of the sweep and its trials, which replace those of an earlier session."""
    for one in swept.trials:
        if one.state == "finished":
            yield Tagged(run=one.run, tags={"best": str(one.number == swept.best).lower()})
        elif one.state == "stopped early":
            yield Tagged(run=one.run, tags={"stopped_early": one.message})
    states = Counter(one.state for one in swept.trials)
    yield Tagged(run=swept.run, tags={"trials": ", ".join(f"{count} {state}" for state, count in states.items())})
    if (best := swept.trial(swept.best)) is not None:
        tags = {"best_run": best.run} | {f"best.{key}": str(value) for key, value in best.values.items()}
        yield Tagged(run=swept.run, tags={**tags, f"best.{swept.metric}": figure(best.value)})
