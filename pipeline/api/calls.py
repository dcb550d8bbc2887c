"""``run`` and ``benchmark`` from Python: the commands, with results returned and errors raised."""

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from pipeline import registry
from pipeline.api.experiment import Experiment, Source
from pipeline.api.result import BenchmarkResult, RunResult
from pipeline.commands import run as runner
from pipeline.commands.benchmark import measure
from pipeline.commands.benchmark.matrix import MatrixRequest
from pipeline.commands.benchmark.predicted_rows import parse_request
from pipeline.errors import Terminated, UsageError, terminate
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.targets import check_not_importing
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.record.console import stages_on
from pipeline.record.screen import Terminal
from pipeline.report.report import Report
from pipeline.results import record
from pipeline.system import environment, handled, hang_up, importable, missing_user_variables
from pipeline.wording import did_you_mean


def run(
    experiment: Experiment | Source,
    *overrides: str,
    baseline: bool = True,
    train_only: bool = False,
    resume: str | None = None,
    allow_changed: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> RunResult:
    """Train an experiment and measure its speedup over a baseline, as ``pipeline run`` does.

    Args:
        experiment: an experiment file, a dict with the same content, or the result of `Experiment.load`.
        overrides: overrides of keys, such as "train.epochs=2".
        baseline: True to measure the baseline and report the speedup.
        train_only: True to skip all performance measurements.
        resume: the interrupted run to resume: "latest", a unique part of its id, or its folder.
        allow_changed: True to resume even if the learning rate, the length of the training or the data has changed.
        quiet: True to print only warnings.
        verbose: True to print the workers' output.

    Raises:
        PipelineError: the run failed; a notebook shows only the message.
        KeyboardInterrupt: Ctrl-C, or the kernel was interrupted; the run's status is KILLED.
    """
    ended: list[tuple[record.Result, Path]] = []
    with _started(experiment, overrides, quiet=quiet, verbose=verbose) as file:
        runner.run(
            file,
            with_baseline=baseline,
            train_only=train_only,
            verbose=verbose,
            terminal=_terminal(quiet=quiet),
            show=lambda result, folder: ended.append((result, folder)),
            resume=resume,
            allow_changed=allow_changed,
        )
    return RunResult.of(*ended[-1])


def benchmark(
    experiment: Experiment | Source,
    *overrides: str,
    strategies: Sequence[str] = (),
    workers: Sequence[int] = (),
    repeats: int = 3,
    batch_sizes: Sequence[int] = (),
    predict: Sequence[int] = (),
    network: str | None = None,
    profile: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> BenchmarkResult:
    """Measure the throughput of strategies and numbers of workers, as ``pipeline benchmark FILE`` does.

    Args:
        experiment: as in `run`.
        overrides: as in `run`.
        strategies: names of strategies; default: those of the baseline and of the experiment.
        workers: numbers of workers; default: those of the baseline and of the experiment.
        repeats: number of times to measure each configuration; configurations alternate.
        batch_sizes: batch sizes per device to measure the experiment's configuration with.
        predict: numbers of workers to add predicted rows for.
        network: bandwidth and latency between predicted workers, such as "25Gbit,20us"; default: measured here.
        profile: True to record a torch.profiler trace of each configuration.
        quiet: True to print only warnings.
        verbose: True to print the workers' output.

    Raises:
        PipelineError: a measurement failed; the run's folder contains the measurements before the failure.
        KeyboardInterrupt: as `run`.
    """
    ended: list[tuple[Report, Path]] = []
    _check_wanted(strategies, (*workers, *batch_sizes), repeats)
    counts, link = parse_request(predict, network)
    with _started(experiment, overrides, quiet=quiet, verbose=verbose) as file:
        measure.benchmark(
            file,
            wanted=MatrixRequest(
                strategies=tuple(strategies),
                workers=tuple(workers),
                repeats=repeats,
                profile=profile,
                batch_sizes=tuple(batch_sizes),
                predict=counts,
                network=link,
            ),
            verbose=verbose,
            terminal=_terminal(quiet=quiet),
            show=lambda report, folder: ended.append((report, folder)),
        )
    return BenchmarkResult.of(*ended[-1])


def _check_wanted(strategies: Sequence[str], counts: Sequence[int], repeats: int) -> None:
    known = registry.names("strategies")
    for name in (strategies,) if isinstance(strategies, str) else strategies:
        if name not in known:
            hint = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"strategies: {name!r} is not a strategy{hint}")
    if isinstance(strategies, str):
        raise UsageError(f'strategies: is a string. Pass a list, ["{strategies}"].')
    for count in (*counts, repeats):
        if type(count) is not int or count < 1:
            raise UsageError(f"workers, batch_sizes and repeats must be integers of at least 1, not {count!r}")


def _terminal(*, quiet: bool) -> Terminal:
    """Return the terminal of a command; in a notebook without the report, since the returned value is shown."""
    terminal = Terminal.of(as_json=quiet, quiet=quiet)
    if not terminal.progress.is_jupyter:
        return terminal
    return terminal._replace(result=Terminal.of(as_json=True, quiet=True).result)


@contextmanager
def _started(
    experiment: Experiment | Source, overrides: Sequence[str], *, quiet: bool, verbose: bool
) -> Iterator[ExperimentFile]:
    """Prepare this process for a run: make its code importable; restore global state afterwards.

    Yields the experiment while the processes that it needs start. A script's terminal shows what it waits for.

    Raises:
        UsageError: a run can't be started in this process or thread.
    """
    check_not_importing()
    if (outer := outer_launcher()) is not None:
        raise UsageError(f"pipeline starts the workers. Start this script without {outer.name}.")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("pipeline handles signals, which only the main thread receives. Call it in the main thread.")
    try:
        shown = stages_on(_terminal(quiet=quiet).progress)
        user = environment(**missing_user_variables())
        with shown, user, _sigterm_as_error(), importable(Path.cwd()), _generators_kept():
            file = Experiment.load(experiment, *overrides).file
            launcher = registry.load("launchers", file.experiment.parallel.launcher).Launcher
            with launcher.preparing(file.experiment, verbose=verbose):
                yield file
    except KeyboardInterrupt as error:
        raise type(error) from None  # without the way through our code


@contextmanager
def _sigterm_as_error() -> Iterator[None]:
    """End the run in order at SIGTERM or SIGHUP, then apply SIGTERM as without a run."""
    hang_ups = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    try:
        with handled(terminate, signal.SIGTERM), handled(hang_up, *hang_ups):
            yield
    except Terminated:
        signal.raise_signal(signal.SIGTERM)
        raise


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore random number generators and threads, which the launcher ``inprocess`` sets in this process."""
    threads, python, numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
