"""The commands from Python: ``from pipeline import Experiment, run, benchmark``, in scripts and notebooks.

They are the commands, with results returned and errors raised.
"""

import html
import json
import math
import re
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from pipeline import registry
from pipeline.commands import benchmark as benchmarks
from pipeline.commands import run as runner
from pipeline.commands.options import check_strategies, find_trained
from pipeline.drive.checkpoints import find_initial
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, Terminated, UsageError, terminate
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile, from_mapping, load, parse_vary, to_yaml
from pipeline.experiment.targets import allowed_packages, check_not_importing
from pipeline.experiment.values import Component
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.protocol.events import WEIGHTS, Metrics
from pipeline.protocol.trial import Rank, Training
from pipeline.protocol.trial_result import is_of_whole_run
from pipeline.record import journal, loss_file, runs
from pipeline.record.console import stages_on
from pipeline.record.folder import EXPERIMENT_NAME
from pipeline.record.screen import Terminal
from pipeline.results import record
from pipeline.results.page import FILE_NAME as PAGE_NAME
from pipeline.results.prediction import parse_link
from pipeline.results.record import mlflow_table
from pipeline.results.terminal import format_screen
from pipeline.system import environment, handle_signals, hang_up, importable, missing_user_variables
from pipeline.tasks import Loss
from pipeline.tracking.store import TrackingOutcome, places_of
from pipeline.train.build import build
from pipeline.train.evaluate import forward
from pipeline.train.exported import trained_model
from pipeline.train.loader import to_device
from pipeline.train.order import keep_generators
from pipeline.train.reference import Reference
from pipeline.wording import format_parallel

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BenchmarkResult", "Experiment", "Parts", "Result", "RunResult", "Trained", "benchmark", "run"]
_METRICS = ("train/", "validation/", "test/")
Source = str | PathLike[str] | Mapping[str, Any]

# By tqdm, which libraries import, in a notebook without ipywidgets. The bars of pipeline need no widgets.
warnings.filterwarnings("ignore", message="IProgress not found")


@dataclass(frozen=True)
class Experiment:
    """Checked experiment, made by `load`."""

    source: Source
    """File or dict that it was loaded from."""
    overrides: tuple[str, ...]
    file: ExperimentFile
    """Checked source; ``file.experiment`` has its sections."""

    @classmethod
    def load(cls, source: "Source | Experiment", *overrides: str) -> "Experiment":
        """Load an experiment from a file, or a dict with a file's content; ``overrides`` are ``key=value``.

        Raises:
            UsageError: the file can't be read, or an override is malformed.
            ExperimentError: the experiment is wrong; contains every problem that was found.
        """
        if isinstance(source, Experiment):
            return cls.load(source.source, *source.overrides, *overrides) if overrides else source
        if isinstance(source, Mapping):
            return cls(deepcopy(source), overrides, from_mapping(source, overrides))
        return cls(source, overrides, load(str(source), overrides))

    def build(self) -> "Parts":
        """Build its model, data, loss and metrics in this process, for tests and notebooks.

        Raises:
            ExperimentError: a component can't be built; contains all problems with their lines.
        """
        return Parts(self.file)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.file.experiment.name

    def arguments(self, section: str) -> Mapping[str, Any]:
        """Return the arguments of a component, with values of the environment, by its section, such as "data".

        Raises:
            ExperimentError: an environment variable is not set.
            UsageError: the section does not exist, or is not a component.
        """
        component = getattr(references.fill_in(self.file.experiment), section, None)
        if not isinstance(component, Component):
            raise UsageError(f"{section}: {self.name} has no component with this name. Use model or data.")
        if unset := references.find_unset_variables(str(component.arguments)):
            raise ExperimentError.of(section, references.explain_unset(unset[0]))
        return component.arguments

    def to_yaml(self) -> str:
        """Return the experiment as YAML, with defaults, without credentials."""
        return to_yaml(self.file.experiment)

    def __repr__(self) -> str:
        parallel = self.file.experiment.parallel
        return f"Experiment({self.name}: {format_parallel(parallel.strategy, parallel.workers)}, {parallel.launcher})"


class Parts:
    """Model, data, loss and ``metrics``, built on the CPU as in a worker; created by ``Experiment.build()``."""

    def __init__(self, file: ExperimentFile) -> None:
        """Build the parts, see `Experiment.build`."""
        from torchmetrics import MetricCollection

        with explain_problems(file), importable(Path.cwd()), keep_generators():
            trial = Training(
                name="main",
                experiment=file.experiment,
                strategy="single",
                launcher="inprocess",
                workers=1,
                devices_per_worker=0,
                device="cpu",
                cpus_per_worker=torch.get_num_threads(),
                allowed=allowed_packages(),
                initial=find_initial(file.experiment),
            )
            self._state = build(trial, rank=Rank())
            self._state.trainee.keeps_outputs = True
            self.metrics = self._state.metrics or MetricCollection({})
            """Validation metrics by name; each takes outputs and targets of a step."""

    @property
    def model(self) -> nn.Module:
        """The model, in training mode, in the precision of ``train.precision``."""
        return self._state.model

    @property
    def train_samples(self) -> int:
        """Size of the training set."""
        return self._state.order.set_size

    @property
    def validation_samples(self) -> int:
        """Size of the validation set; 0 if there is none."""
        return self._state.batches.size("validation")

    def batch(self, samples: Iterable[int], *, validation: bool = False) -> Any:
        """Return samples of the training or validation set as one batch, in the form that the model receives.

        Raises:
            TrainingError: a sample can't be read.
            ExperimentError: the samples can't be collated, or the data has no validation set.
        """
        batches = self._state.batches
        return batches.place(batches.read(list(samples), "validation" if validation else None))

    def step(self, batch: Any) -> Loss:
        """Compute loss, outputs and targets of the model on a batch, with the experiment's loss or task.

        The loss is a sum over the items of the batch: divide ``sum`` by ``count``, or by the number of samples if that
        is None. With several optimizers, it is the sum of the optimizers' losses, and the logs contain each of these.
        """
        return forward(self._state, batch)


@dataclass(frozen=True)
class Trained:
    """Trained model with its run, created by `load`."""

    folder: Path
    """Folder of the run."""
    experiment: Experiment
    """Experiment of the run."""
    model: nn.Module
    """The model in evaluation mode, on the CPU, with the weights from the end of training."""

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for a batch of inputs, without gradients, on the model's device.

        Args:
            batch: inputs without targets: a tensor with one sample per row, or a mapping from the names of the model's
                arguments to tensors.
        """
        device = next(self.model.parameters()).device
        is_double = self.experiment.file.experiment.train.precision == "fp64"
        inputs = to_device(batch, device=device, dtype=torch.float64 if is_double else None)
        return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)

    @classmethod
    def load(cls, run: str | PathLike[str] = runs.LATEST, *, directory: str | PathLike[str] = "runs") -> "Trained":
        """Load the model of a run: "latest", a unique part of its id, or its folder.

        "latest" is the newest completed training without ``--quick``; a line on stderr names a newer one that did not
        complete. The model's class comes from the project's current code. MLflow is not needed.

        Raises:
            UsageError: the run does not exist, has no trained model, or its weights don't fit the current model.
            ExperimentError: the model can't be built, or computes other outputs than in the run's evaluation.
        """
        folder = find_trained(str(run), Path(directory))
        weights = folder / WEIGHTS
        if not weights.is_file():
            raise UsageError(f"{folder}: has no {WEIGHTS}. Name a run whose training is complete.")
        experiment = Experiment.load(folder / EXPERIMENT_NAME)
        try:
            with explain_problems(experiment.file), importable(Path.cwd()):
                values = torch.load(weights, map_location="cpu", weights_only=True)
                reference = Reference.load(folder)
                own = experiment.file.experiment
                model = trained_model(own, values, allowed=allowed_packages(), reference=reference)
        except (OSError, RuntimeError, LookupError, EOFError, UnpicklingError) as error:
            cause = " ".join(str(error).split())[:300]
            raise UsageError(
                f"{weights}: cannot be loaded into {experiment.file.experiment.model.target}: {cause or 'damaged'}. "
                "Use the code of the training, or name another run."
            ) from error
        return cls(folder, experiment, model)


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a command, and where it is stored; a notebook shows the screen and the figures."""

    result: record.Result
    """Answer, facts, tables, notes and advice."""
    folder: Path
    """Folder of the run: event log, result, page, worker logs."""
    mlflow_experiment_id: str | None
    """Id of the MLflow experiment; None if MLflow never answered."""
    mlflow_run_id: str | None
    """Id of the main MLflow run; None if MLflow never answered."""

    @classmethod
    def of(cls, result: record.Result, folder: Path) -> Self:
        """Return the result of a run that has ended."""
        kept = TrackingOutcome.read(folder)
        experiment, run = (kept.experiment_id, kept.run_id) if kept else ("", "")
        return cls(result, folder.resolve(), experiment or None, run or None)

    @property
    def speedup(self) -> float | None:
        """Throughput divided by the baseline's throughput; None if no speedup was measured.

        For a benchmark, this is the speedup of the configuration with the most workers.
        """
        return self._value("speedup")

    @property
    def efficiency(self) -> float | None:
        """Scaling efficiency: speedup divided by the ratio of devices; None if no speedup was measured."""
        return self._value("efficiency")

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row for each trial and a column for each fact, NaN for unknown values."""
        import pandas as pd

        table = json.loads(mlflow_table(self.result))
        return pd.DataFrame(table["data"], columns=table["columns"]).set_index("trial")

    def _value(self, key: str) -> float | None:
        fact = self.result.fact(key)
        return None if fact is None else fact.value

    def __str__(self) -> str:
        return f"{self.result.name}: {self.result.verdict}\n{places_of(self.folder)}"

    def __repr__(self) -> str:
        """Identify the run only: an interactive Python prints this after `run` has printed the result."""
        return f"{type(self).__name__}({self.result.name}: {self.folder})"

    def _repr_html_(self) -> str:
        page = self.folder / PAGE_NAME
        drawn = re.findall(r"<svg.*?</svg>", page.read_text("utf-8"), re.DOTALL) if page.is_file() else []
        return f"<pre>{html.escape(chr(10).join(format_screen(self.result)))}</pre>{''.join(drawn)}"


@dataclass(frozen=True, repr=False)
class RunResult(Result):
    """Result of a training and its baseline."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Last value of each metric of the training, e.g. "validation/accuracy"."""
        facts = (fact for fact in self.result.all_facts if fact.trial == "main" and fact.key.startswith(_METRICS))
        return {fact.key: math.nan if fact.value is None else fact.value for fact in facts}

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each step of the training, the mean over its global batch."""
        return loss_file.read(self.folder) or tuple(self.history()["train/loss"].dropna())

    def history(self) -> "pd.DataFrame":
        """Return each metric of the training by step, counted from 1; NaN in steps without a value."""
        import pandas as pd

        values: dict[str, dict[int, float]] = {}
        for event in journal.read(self.folder / journal.FILE_NAME):
            if isinstance(event, Metrics) and event.trial == "main":
                for point in (point for point in event.points if not is_of_whole_run(point.name)):
                    values.setdefault(point.name, {})[point.step] = point.value
        return pd.DataFrame(values).sort_index().rename_axis("step")


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """Result of a benchmark."""

    @property
    def best(self) -> str:
        """Name of the configuration with the highest valid speedup and the baseline's losses; else of the baseline."""
        compared = {fact.trial for fact in self.result.all_facts if fact.key == "largest_loss_difference"}
        speedups = [fact for fact in self.result.all_facts if fact.key == "speedup" and fact.state != "invalid"]
        cells = [fact for fact in speedups if fact.trial in compared - {"main", "reference"}]
        return max(cells, key=lambda fact: fact.value or 0.0).trial if cells else "baseline"


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
    """Train an experiment and measure its speedup over a baseline, as ``pipeline run`` does; return a `RunResult`.

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
    with _prepare_process(experiment, overrides, quiet=quiet, verbose=verbose) as file:
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
    vary: str | None = None,
    predict: Sequence[int] = (),
    network: str | None = None,
    profile: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> BenchmarkResult:
    """Measure the speed of strategies, workers and other keys, as ``pipeline benchmark``; return a `BenchmarkResult`.

    Args:
        experiment: as in `run`.
        overrides: as in `run`.
        strategies: names of strategies; default: those of the baseline and of the experiment.
        workers: numbers of workers; default: those of the baseline and of the experiment.
        repeats: number of times to measure each configuration; configurations alternate.
        batch_sizes: batch sizes per device to measure the experiment's configuration with.
        vary: values of keys to measure instead of the experiment's, such as "loader.num_workers=0,2".
        predict: numbers of workers to add predicted rows for.
        network: bandwidth and latency between predicted workers, such as "25Gbit,20us"; default: measured here.
        profile: True to record a torch.profiler trace of each configuration.
        quiet: True to print only warnings.
        verbose: True to print the workers' output.

    Raises:
        PipelineError: a measurement failed; the run's folder contains the measurements before the failure.
        KeyboardInterrupt: as `run`.
    """
    ended: list[tuple[record.Result, Path]] = []
    if isinstance(strategies, str):
        raise UsageError(f'strategies: is a string. Pass a list, ["{strategies}"].')
    check_strategies("strategies", strategies)
    for count in (*workers, *batch_sizes, *predict, repeats):
        if type(count) is not int or count < 1:
            raise UsageError(f"workers, batch_sizes, predict and repeats must be integers of at least 1, not {count!r}")
    varied, shared = parse_vary(vary) if vary is not None else ([], [])
    request = benchmarks.Request(
        strategies=tuple(strategies),
        workers=tuple(workers),
        repeats=repeats,
        profile=profile,
        batch_sizes=tuple(batch_sizes),
        vary=tuple(map(tuple, varied)),
        predict=tuple(predict),
        network=parse_link(network) if network is not None else None,
    )
    with _prepare_process(experiment, (*overrides, *shared), quiet=quiet, verbose=verbose) as file:
        benchmarks.benchmark(
            file,
            request=request,
            verbose=verbose,
            terminal=_terminal(quiet=quiet),
            show=lambda result, folder: ended.append((result, folder)),
        )
    return BenchmarkResult.of(*ended[-1])


def _terminal(*, quiet: bool) -> Terminal:
    """Return the terminal of a command; in a notebook without the result, since the returned value is shown."""
    terminal, silent = Terminal.of(as_json=quiet, quiet=quiet), Terminal.of(as_json=True, quiet=True)
    return terminal._replace(result=silent.result) if terminal.progress.is_jupyter else terminal


@contextmanager
def _prepare_process(
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
    threads, hang_ups = (
        torch.get_num_threads(),
        [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else [],
    )
    try:
        with (
            stages_on(_terminal(quiet=quiet).progress),
            environment(**missing_user_variables()),
            handle_signals(terminate, signal.SIGTERM),
            handle_signals(hang_up, *hang_ups),
            importable(Path.cwd()),
            keep_generators(),  # which the launcher inprocess seeds in this process, as it sets the threads
        ):
            file = Experiment.load(experiment, *overrides).file
            launcher = registry.load("launchers", file.experiment.parallel.launcher).Launcher
            with launcher.preparing(file.experiment, verbose=verbose):
                yield file
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):  # what the signal means without a run comes after the run
            signal.raise_signal(signal.SIGTERM)
        raise type(error) from None  # without the way through our code
    finally:
        torch.set_num_threads(threads)
