"""``pipeline tune-batch``: a search for the batch size of a device, and advice on what to write in the file."""

from pipeline.commands.invocation import invoked, planning, refuse_outer_launcher
from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Configuration
from pipeline.errors import ResourceError
from pipeline.planning.layout import Planner
from pipeline.planning.plan import Plan
from pipeline.protocol.trial import Trial, Tuning
from pipeline.protocol.trial_result import BatchSizes
from pipeline.recording.terminal import Terminal
from pipeline.report.tuned import FILE_NAME, TunedReport, advise_batch


def tune_batch(file: ExperimentFile, *, most: int | None, verbose: bool, terminal: Terminal) -> TunedReport:
    """Find the batch size of a device for an experiment; its file is not changed.

    Args:
        file: the experiment.
        most: the largest batch of one device to try; None goes as far as memory or data allow.
        verbose: True to show the workers' output.
        terminal: shows progress, warnings and the report.

    Raises:
        PipelineError: ready to be shown.
    """
    refuse_outer_launcher("tune-batch")
    plan = make(file, most=most)
    (trial,) = plan.trials
    with invoked(plan, file=file, terminal=terminal, verbose=verbose, tracked=False) as invocation:
        (outcome,) = invocation.execute(plan.trials)
        sizes = outcome.batch_sizes
        assert sizes is not None  # the trial has ended well
        if sizes.recommended is None:
            raise ResourceError(_too_small(trial, sizes))
        advice = advise_batch(trial, sizes, recommended=sizes.recommended)
        report = TunedReport.of(trial, sizes, advice, hardware=invocation.hardware)
        invocation.save({FILE_NAME: report.model_dump_json(indent=1) + "\n"})
        invocation.show(report, summary="\n".join([advice.reason, *advice.change]))
    return report


def make(file: ExperimentFile, *, most: int | None) -> Plan:
    """Check the file and plan the one trial; for the errors see `planning`."""
    parallel = file.experiment.parallel
    own = Configuration(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    with planning(file) as (allowed, resources):
        trial = Planner(file.experiment, resources, allowed).trial(Tuning, own, max_batch_size=most)
    return Plan(command="tune-batch", experiment=file.experiment, resources=resources, trials=(trial,))


def _too_small(trial: Trial, sizes: BatchSizes) -> str:
    return (
        f"not even a batch of {sizes.candidates[0].batch_size} fits into the memory of each "
        f"{'GPU' if trial.device == 'cuda' else 'worker'}; use a smaller model, smaller samples or more memory"
    )
