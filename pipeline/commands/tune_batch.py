"""The whole story of ``pipeline tune-batch``: one trial that looks for a batch size, and what to write in the file."""

from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Comparison
from pipeline.driver.execute import execute, explained, launcher_of, prepare
from pipeline.errors import ResourceError, UsageError
from pipeline.planning.layout import Planner
from pipeline.planning.plan import Plan
from pipeline.protocol.trial import BatchSizes, Trial
from pipeline.recording import provenance
from pipeline.recording.console import print_report
from pipeline.recording.recorded_run import artifact, recorded
from pipeline.recording.terminal import Terminal
from pipeline.report.tuned import FILE_NAME, TunedReport, advise_batch
from pipeline.system.process import outer_rank


def tune_batch(file: ExperimentFile, *, most: int | None, verbose: bool, terminal: Terminal) -> TunedReport:
    """Find the batch size of a device for the experiment as it is declared; the file stays as it is.

    Args:
        file: the experiment.
        most: the largest batch of one device to try; None goes as far as memory or data allow.
        verbose: whether to let the workers' output through.
        terminal: where progress and the result are shown.

    Raises:
        PipelineError: what went wrong, ready to be shown.
    """
    if outer_rank() is not None:
        raise UsageError("pipeline tune-batch starts its workers itself: call it without torchrun")
    plan = make(file, most=most)
    (trial,) = plan.trials
    with recorded(plan, terminal=terminal, tracked=False) as recorder:
        with launcher_of(plan, recorder, verbose=verbose) as launcher:
            execute(trial, launcher=launcher, recorder=recorder, file=file)
        sizes = recorder.batch_sizes
        assert sizes is not None  # the trial has ended well
        if sizes.recommended is None:
            raise ResourceError(_too_small(trial, sizes))
        advice = advise_batch(trial, sizes, recommended=sizes.recommended)
        recorder.summary = "\n".join([advice.reason, *advice.change])
        report = TunedReport.of(trial, sizes, advice, hardware=provenance.hardware(plan))
        (recorder.folder / FILE_NAME).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
        artifact(FILE_NAME, recorder)
        print_report(report, stdout=terminal.result)
    return report


def make(file: ExperimentFile, *, most: int | None) -> Plan:
    """Check what the file names and plan the one trial; starts nothing.

    Raises:
        ExperimentError: the file is wrong.
        ResourceError: the machine or the cluster is too small.
    """
    allowed, resources = prepare(file)
    parallel = file.experiment.parallel
    own = Comparison(strategy=parallel.strategy, workers=parallel.workers, options=parallel.options)
    with explained(file):
        trial = Planner(file.experiment, resources, allowed).trial(own, role="tuning")
    trial = trial.model_copy(update={"max_batch_size": most})
    return Plan(command="tune-batch", experiment=file.experiment, resources=resources, trials=(trial,))


def _too_small(trial: Trial, sizes: BatchSizes) -> str:
    return (
        f"not even a batch of {sizes.candidates[0].batch_size} fits into the memory of each "
        f"{'GPU' if trial.device == 'cuda' else 'worker'}; use a smaller model, smaller samples or more memory"
    )
