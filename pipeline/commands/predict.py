"""``pipeline predict``: the predicted speedup, calculated from measurements of one worker and of a link."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pipeline import registry
from pipeline.commands.invocation import Invocation, invoked, planning, refuse_outer_launcher
from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Configuration, Experiment
from pipeline.errors import ExperimentError, ResourceError, TrainingError
from pipeline.planning.layout import Planner
from pipeline.planning.plan import Plan
from pipeline.planning.resources import Resources
from pipeline.protocol.trial import Probe, Scaling
from pipeline.protocol.trial_result import Costs, Link, TrialResult
from pipeline.recording.terminal import Terminal
from pipeline.report.forecast import FILE_NAME, Check, Forecast
from pipeline.report.link import fit
from pipeline.report.prediction import Workload, at_pace, compute_ms
from pipeline.report.prediction import predict as predict_speedup

if TYPE_CHECKING:
    from pipeline.strategies.ddp import Options

_HALVED = {"none": 1.0, "fp16": 2.0, "bf16": 2.0}


def predict(
    file: ExperimentFile,
    *,
    workers: int,
    link: Link | None,
    scaling: Literal["strong", "weak", "both"],
    verbose: bool,
    terminal: Terminal,
    show: Callable[[Forecast], None],
) -> None:
    """Measure the parts of a step, and predict the speedup up to ``workers``.

    Args:
        file: the experiment.
        workers: the largest number of workers to predict.
        link: between the workers; None measures it between those that fit here.
        scaling: the kinds of scaling to predict.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the report.
        show: gets the prediction, e.g. to print it as JSON.

    Raises:
        PipelineError: ready to be shown.
    """
    refuse_outer_launcher("predict")
    with planning(file) as (allowed, resources):
        plan = make_plan(file.experiment, resources, allowed=allowed, link=link)
    scalings: tuple[Scaling, ...] = ("strong", "weak") if scaling == "both" else (scaling,)
    with invoked(plan, file=file, terminal=terminal, verbose=verbose) as invocation:
        invocation.execute(plan.trials)
        forecast = _forecast(invocation, link=link, workers=workers, scalings=scalings)
        invocation.show(forecast, summary=forecast.markdown())
        invocation.save({FILE_NAME: forecast.model_dump_json(indent=1) + "\n"})
        invocation.save_report(forecast)
        show(forecast)


def make_plan(experiment: Experiment, resources: Resources, *, allowed: tuple[str, ...], link: Link | None) -> Plan:
    """Plan a probe of one worker and, unless the link is given, one of several workers that measures the link.

    Raises:
        ExperimentError: there is no prediction for the options, or for several optimizers.
        ResourceError: the link isn't given, and there is no room for two workers to measure it.
    """
    if experiment.optimizers:
        message = "take turns in a step, which the model of a step does not cover; measure with pipeline compare"
        raise ExperimentError.of("optimizers", message)
    options = _options(experiment)
    if options.communication_hook not in _HALVED:
        raise ExperimentError.of(
            "parallel.options.communication_hook",
            f"is {options.communication_hook}, with which no speedup can be predicted; write none, fp16 or bf16",
        )
    together = 0 if link else _room(experiment, resources)
    planner = Planner(experiment, resources, allowed, workers=together or None)
    trials = [planner.trial(Probe, Configuration(strategy="single"), name="alone")]
    if together:
        entry = Configuration(strategy="ddp", workers=together, options=options.model_dump(exclude_defaults=True))
        trials.append(planner.trial(Probe, entry, name="together"))
    return Plan(command="predict", experiment=experiment, resources=resources, trials=tuple(trials))


def workload_of(
    experiment: Experiment, alone: TrialResult, together: TrialResult | None = None, *, device: str
) -> Workload:
    """Return the workload that the model takes, from the results of the probes."""
    assert alone.costs is not None
    options = _options(experiment)
    workload = Workload(
        costs=alone.costs,
        optimizer_ms=alone.parts.rest_ms or 0.0,
        global_batch_size=experiment.train.global_batch_size,
        micro_batches=experiment.train.gradient_accumulation,
        loader_workers=experiment.loader.num_workers,
        bucket_bytes=options.bucket_cap_mb * 2**20,
        compression=_HALVED[options.communication_hook],
        backend="nccl" if device == "cuda" else "gloo",
        slowdown=_slowdown(alone.costs, together.costs) if together and together.costs else 1.0,
    )
    return at_pace(workload, step_ms=alone.step_ms.median)


def _options(experiment: Experiment) -> "Options":
    parallel = experiment.parallel
    kind: type[Options] = registry.load("strategies", "ddp").Strategy.Options
    return kind.model_validate(parallel.options if parallel.strategy == "ddp" else {})


def _room(experiment: Experiment, resources: Resources) -> int:
    """Return how many workers can run at once to measure the link.

    Raises:
        ResourceError: fewer than two.
    """
    parallel = experiment.parallel
    wanted = max(2, parallel.workers)
    launcher = parallel.launcher
    if not registry.load("launchers", launcher).Launcher.many_processes:
        raise ResourceError(
            f"the link can't be measured: launcher {launcher} runs one process; give the link, e.g. --link "
            "10Gbit,50us, or write parallel.launcher=torchrun"
        )
    cores = resources.cpus // (parallel.cpus_per_worker or max(1, resources.cpus // wanted))
    uses_gpus = parallel.device == "cuda" or (parallel.device == "auto" and resources.gpus)
    fit_here = min(wanted, cores, experiment.train.global_batch_size, *([len(resources.gpus)] if uses_gpus else []))
    if fit_here < 2:
        raise ResourceError(
            f"the link can't be measured: two workers don't fit on {resources.node} with {resources.summary}; give the "
            "link, e.g. --link 10Gbit,50us"
        )
    return fit_here


def _slowdown(alone: Costs, together: Costs) -> float:
    """Return the ratio of a worker's computing time next to other workers to its time alone, at least 1."""
    cost = together.curve[-1]
    return max(1.0, (cost.forward_ms + cost.backward_ms) / compute_ms(alone, samples=cost.samples))


def _forecast(invocation: Invocation, *, link: Link | None, workers: int, scalings: tuple[Scaling, ...]) -> Forecast:
    plan, results = invocation.plan, invocation.results
    alone, together = results["alone"], results.get("together")
    if alone.costs is None:
        raise TrainingError("no speedup can be predicted: what that needs could not be measured, see the warning")
    workload = workload_of(plan.experiment, alone, together, device=plan.main.device)
    if together is not None and together.costs is not None:
        measured = together.costs
        link = fit(measured.all_reduces, workers=measured.world_size, backend=workload.backend)
    if link is None:
        raise TrainingError("the link could not be measured, see the warning; give it, e.g. --link 10Gbit,50us")
    check = _check(workload, link, alone, together) if together else None
    largest = alone.costs.curve[-1]
    return Forecast.of(
        workload,
        link,
        workers=workers,
        scalings=scalings,
        name=plan.experiment.name,
        hardware=invocation.hardware,
        compute_ms_per_sample=(largest.forward_ms + largest.backward_ms) / largest.samples,
        link_from="measured" if check else "given",
        measured_workers=check.workers if check else 0,
        check=check,
    )


def _check(workload: Workload, link: Link, alone: TrialResult, together: TrialResult) -> Check | None:
    """Compare the prediction with the measured throughput; None without a measured link."""
    if together.costs is None:
        return None
    workers = together.costs.world_size
    measured = together.samples_per_second.median / alone.samples_per_second.median
    return Check(
        workers=workers,
        measured=measured,
        predicted=predict_speedup(workload, link, workers=workers).speedup,
    )
