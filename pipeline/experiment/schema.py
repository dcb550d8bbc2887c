"""The experiment file as frozen, strict types; their docstrings are the descriptions in JSON Schema and docs/keys.md.

Two large sections have files of their own: `train`, with the optimizers, and `sweep`.
"""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_serializer,
    field_validator,
    model_validator,
)

from pipeline import registry
from pipeline.experiment.sweep import Sweep
from pipeline.experiment.train import NamedOptimizer, Optimizer, Train
from pipeline.experiment.uris import expand_home, problem_of, without_credentials
from pipeline.experiment.values import (
    Component,
    FilePath,
    Mode,
    NotNegative,
    OrName,
    Positive,
    PositiveFloat,
    Section,
    Writable,
)

LIGHTNING = "pipeline.tasks.Lightning"
"""Task of a LightningModule, which is the model, and brings its own optimizer and scheduler."""
LIGHTNING_OPTIMIZER = "pipeline.tasks.lightning.configured_optimizer"
LIGHTNING_SCHEDULER = "pipeline.tasks.lightning.configured_scheduler"


DEFAULT_COLLATE = "torch.utils.data.default_collate"
"""A collate function itself, as a component for ``loader``; others build one."""


class Loader(Section):
    """DataLoader of each worker."""

    num_workers: NotNegative = 0
    """DataLoader worker processes per training worker; 0 loads in the training process."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Copy batches to page-locked memory; auto: true on a GPU."""
    persistent_workers: bool = True
    """Keep the DataLoader worker processes between epochs."""
    prefetch_factor: Positive = 2
    """Batches that each DataLoader worker process prefetches."""
    random: bool | None = None
    """Seed the global random generators for each sample: true for a dataset that draws random numbers, e.g. to augment
    images. By default, a few samples of each dataset show it once, and a dataset that draws only later is an error.
    false never seeds samples, and does not check. Samples of an iterable dataset are always seeded."""
    collate: Component | None = None
    """Component that builds the collate_fn; default: torch's default_collate."""
    evaluation_collate: Component | None = None
    """Component that builds the collate_fn of validation and test sets; default: ``collate``. Required if ``collate``
    draws random numbers and there is such a set."""


def _check_name(kind: registry.Kind) -> AfterValidator:
    def check(name: str) -> str:
        if name not in (known := registry.names(kind)):
            raise ValueError(f"unknown; choose one of {', '.join(known)}")
        return name

    return AfterValidator(check)


def _list_names(kind: registry.Kind) -> Any:
    return Field(json_schema_extra=lambda schema: schema.update(enum=[*registry.names(kind)]))


StrategyName = Annotated[str, _check_name("strategies"), _list_names("strategies")]
LauncherName = Annotated[str, _check_name("launchers"), _list_names("launchers")]


def _least_and_most(value: object) -> object:
    """Expand ``4`` to ``[4, 4]``."""
    both = [value, value] if isinstance(value, int) else value
    if not isinstance(both, list | tuple) or len(both) != 2 or any(type(n) is not int or n < 1 for n in both):
        where = f", instead of {json.dumps(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(f"write an integer greater than 0, or [minimum, maximum]{where}")
    if both[0] > both[1]:
        raise ValueError(f"write the smaller number first: [{both[1]}, {both[0]}]")
    return both


_COUNT = {"type": "integer", "exclusiveMinimum": 0}
WorkerCounts = Annotated[
    tuple[int, int],
    BeforeValidator(_least_and_most),
    PlainSerializer(lambda counts: counts[1] if counts[0] == counts[1] else list(counts), when_used="always"),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}]}),
]
"""The minimum and the maximum number of workers; a single integer stands for both."""


class Parallel(Section):
    """Parallel strategy, launcher, workers and their resources."""

    strategy: StrategyName = "single"
    """Parallel strategy: single, dp, ddp, fsdp, or the name of another package's strategy."""
    launcher: LauncherName = "inprocess"
    """Program that starts the workers: inprocess, torchrun, ray, or the name of another package's launcher."""
    worker_counts: Annotated[WorkerCounts, Field(alias="workers", json_schema_extra={"default": 1})] = (1, 1)
    """Worker processes, one device each. [1, 4] is elastic: as many of 1 to 4 workers as fit when training starts, and
    when it continues after a node was lost."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto uses GPUs if there are any, otherwise the CPU. The plan shows the device."""
    cpus_per_worker: Positive | None = None
    """Cores and threads per worker. Default: the cores of this machine divided by the number of workers, and at most
    OMP_NUM_THREADS."""
    gpus_per_worker: Positive | None = None
    """GPUs per worker, for a strategy that uses several GPUs in one process, such as dp. Default: all GPUs of a node.
    With other strategies, a worker uses one GPU."""
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    """Placement of the workers by Ray. pack: on few nodes. spread: on many nodes. strict_spread: each on a separate
    node."""
    address: Writable | None = None
    """Address of a running Ray cluster, e.g. HOST:6379. Default: RAY_ADDRESS; without it, a local Ray is started."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum time to wait for free resources on a busy cluster, and then until all workers have started and joined the
    process group. Imports on many nodes take minutes."""
    timeout_s: PositiveFloat = 300.0
    """Timeout of collective operations: after this time, a missing rank is reported."""
    max_failures: NotNegative = 0
    """Maximum number of restarts from the latest checkpoint after workers were lost. Fewer workers do not count."""
    grace_s: PositiveFloat = 25.0
    """Maximum time to wait for a checkpoint after SIGTERM. Batch systems kill a job about 30 s after SIGTERM."""
    options: Mapping[str, Any] = {}
    """Options of the strategy; ddp: sync_batch_norm, bucket_cap_mb, gradient_as_bucket_view, static_graph,
    find_unused_parameters, communication_hook (none, fp16, bf16);
    fsdp: groups, reshard_after_forward, cpu_offload, reduce_each_micro_batch, zero_unused_gradients."""

    @property
    def workers(self) -> int:
        """Worker processes, one device each; the maximum if training is elastic."""
        return self.worker_counts[1]

    @property
    def least_workers(self) -> int:
        """Least number of workers that training continues with."""
        return self.worker_counts[0]

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that ``address`` or RAY_ADDRESS names; None: a local Ray."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during training."""
        return self.least_workers < self.workers


class Configuration(Section):
    """Strategy, workers and options to use instead of the values in ``parallel``."""

    strategy: StrategyName
    """Parallel strategy of this configuration."""
    workers: Positive | None = None
    """Workers of this configuration; default: parallel.workers if the strategy runs several processes, else 1."""
    options: Mapping[str, Any] = {}
    """Options of the strategy."""


class Benchmark(Section):
    """Measurement of the speedup over a baseline, and of throughput."""

    baseline: Configuration = Configuration(strategy="single")
    """Configuration that the speedup is measured against. Default: one worker without a strategy."""
    rounds: Annotated[int, Field(ge=5)] = 16
    """Maximum number of rounds of a speedup measurement. A round times the baseline and the training run once each."""
    time_budget_s: PositiveFloat = 30.0
    """Time budget for these rounds, in seconds. At least 5 rounds run, or at least 2 if 5 rounds would take more than
    1.5 times the budget. All measurements after the training take about twice the budget at most."""
    confidence_level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the confidence interval of a speedup."""
    warmup_steps: NotNegative = 3
    """Steps before the first timed window."""
    steps: Positive = 5
    """Steps in one timed window."""
    windows: Positive = 3
    """Number of timed windows; the throughput is the median over the windows."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of one GPU hour, or of one core hour on the CPU, in any currency. The report then includes the cost of the
    training with each strategy."""

    @property
    def limit_s(self) -> float:
        """Time limit in seconds for all measurements after a training."""
        return 2 * self.time_budget_s

    @property
    def total_steps(self) -> int:
        """Steps of one measurement, warm-up included."""
        return self.warmup_steps + self.steps * self.windows


class RegisteredModel(Section):
    """Model in MLflow's registry that gets the trained model as a new version."""

    name: Annotated[str, Field(pattern=r"^[^\s/:'\"]([^/:'\"]*[^\s/:'\"])?$", max_length=250)]
    """Name of the registered model, without slash, colon and quotes. The model is created if it does not exist."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=250)] | None = None
    """Alias that the version gets, e.g. champion: letters, digits, dash and underscore."""

    @field_validator("alias")
    @classmethod
    def _is_free(cls, alias: str | None) -> str | None:
        if alias is not None and (alias.lower() == "latest" or (alias[0] in "vV" and alias[1:].isdecimal())):
            raise ValueError("MLflow reserves this word for versions. Use another alias.")
        return alias


def _logger(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(f"write {', '.join(get_args(LoggerName))}, or _target_: package.name") from None


LoggerName = Literal["tensorboard", "wandb"]
Logger = Annotated[LoggerName | Component, WrapValidator(_logger)]


class Tracking(Section):
    """Destinations of the results: MLflow, a folder for each run, and other trackers."""

    uri: Writable = "sqlite:///mlflow.db"
    """MLflow tracking URI: sqlite:///FILE or the http(s) address of a server. Without it, the environment variable
    MLFLOW_TRACKING_URI is used, then the default."""
    experiment: Writable | None = None
    """Name of the MLflow experiment. Without it, the environment variable MLFLOW_EXPERIMENT_NAME is used, then the name
    of this experiment."""
    directory: FilePath = "runs"
    """Folder for the run folders. Each run folder contains the run's event log, worker logs and report."""
    log_model: bool = True
    """Log the trained model to MLflow. The run's folder always contains the weights."""
    register_model: OrName[RegisteredModel] = None
    """Registered model that gets the trained model of a completed run as a new version: its name, or a section with an
    alias. A run is registered once. Of a sweep, only the best trial is registered."""
    run_name: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    """Name of the run in MLflow. Default: strategy and workers, e.g. "ddp, 2 workers". Trials of a sweep have other
    names."""
    tags: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./ -]*$", max_length=250)], str] = {}
    """Additional tags of the run in MLflow, e.g. {team: vision}. The names of pipeline's tags cannot be used."""
    loggers: tuple[Logger, ...] = ()
    """Destinations in addition to MLflow: tensorboard, wandb, or components. tensorboard and wandb write into the run's
    folder; wandb also sends the results to Weights & Biases. Their packages must be installed. A component is built
    with the run's folder and receives every event."""

    @property
    def named_loggers(self) -> tuple[str, ...]:
        """Loggers that are given by name."""
        return tuple(logger for logger in self.loggers if isinstance(logger, str))

    @property
    def custom_loggers(self) -> dict[str, Component]:
        """Components among the loggers, by key."""
        loggers = enumerate(self.loggers)
        return {f"tracking.loggers[{i}]": logger for i, logger in loggers if isinstance(logger, Component)}

    @field_serializer("uri")
    def _written_without_credentials(self, uri: str) -> str:
        """Remove credentials: only the driver needs them, not files, MLflow parameters or worker processes."""
        return without_credentials(uri)

    @field_validator("uri")
    @classmethod
    def _is_usable(cls, uri: str) -> str:
        if problem := problem_of(uri):
            raise ValueError(problem)
        return expand_home(uri)


class Checkpoint(Section):
    """Checkpoints of the training state: at the end of each epoch and of the run, and at the intervals set here."""

    every_steps: Positive | None = None
    """Steps between two checkpoints inside an epoch."""
    every_minutes: PositiveFloat | None = None
    """Maximum time between two checkpoints, checked whenever metrics are reported."""
    keep: NotNegative = 2
    """Number of latest checkpoints to keep. 0 saves no checkpoints, so training cannot be resumed."""
    best: Annotated[str, Field(pattern=r"^validation/.")] | None = None
    """A metric such as validation/accuracy. The checkpoint with the best value is also kept. Its weights are the result
    of the run: they are saved, logged to MLflow, and evaluated on the test set."""
    mode: Mode = "auto"
    """Direction of ``best``: min if lower is better, max if higher is better. auto uses torchmetrics' higher_is_better,
    and min for validation/loss. auto is an error for metrics without higher_is_better."""
    directory: FilePath | None = None
    """Folder or address (s3://bucket/folder) for checkpoints, with a subfolder per run. Default: the run's folder."""


class Metric(Component):
    """Metric: ``_target_: package.name`` with keyword arguments, and the sets that it is computed for."""

    on: tuple[Literal["train", "validation"], ...] = ("validation",)
    """``[train, validation]`` also computes the metric for the samples of training steps since the last report."""

    @property
    def is_trained(self) -> bool:
        """True if it is also computed for training steps."""
        return "train" in self.on


class Experiment(Section):
    """Experiment: model, data, training and parallel strategy."""

    extends: Annotated[str | None, Field(exclude=True)] = None
    """Path of an experiment file to extend, relative to this file. Its keys are used where this file does not set them.
    Sections are merged key by key; lists and components with a ``_target_`` are replaced."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """The experiment's name: letters, digits, dot, dash and underscore."""
    seed: NotNegative = 0
    """Seed of the global random generators of torch, NumPy and Python. Each random choice depends only on the seed and
    on the step, epoch or sample. Generators that your code creates are not seeded, and not saved in checkpoints."""
    model: Component
    """Any callable that returns a torch.nn.Module. Required unless ``task`` is pipeline.tasks.Lightning with a
    ``module``."""
    data: Component
    """Any callable that returns a training dataset, a validation dataset or None, and optionally a test dataset. The
    datasets are map-style or iterable. The test dataset is evaluated once, at the end."""
    sampler: Component | None = None
    """Any callable (training set, epoch, generator) that returns the indices of an epoch's samples, such as
    pipeline.data.balanced or pipeline.data.by_length (docs/model-and-data.md). Epochs count from 0. All epochs have
    the same number of indices, and an index may repeat. Default: shuffled, each sample once per epoch."""
    loader: Loader = Loader()
    loss: Component | None = None
    """Any callable (outputs, targets) -> scalar mean over the samples, or a loss of torch (docs/model-and-data.md).
    Required unless ``task`` is given."""
    task: Component | None = None
    """Any callable (model, batch) -> pipeline.tasks.Loss, or a plain scalar, the mean over the samples of the batch.
    For batches other than (inputs, targets), and losses other than a mean over samples.
    ``{_target_: pipeline.tasks.Lightning, module: {_target_: mypackage.LitNet}}`` uses a LightningModule unchanged,
    instead of ``model``, ``loss``, ``optimizer`` and ``scheduler``."""
    metrics: Mapping[str, Metric] = {}
    """torchmetrics metrics for the validation set, by name. A metric computes a number, a number per class (NAME_0), a
    confusion matrix (NAME_true_0_predicted_1), or a ROC or precision-recall curve. The last evaluation writes curves,
    and results with more than 1,000 values, to metrics/NAME.csv and .png. ``on: [train, validation]`` also reports a
    metric as train/NAME, for the samples of training steps since the last report."""
    optimizer: Optimizer | None = None
    """Any callable (parameters of model, loss and task) -> optimizer, with ``groups`` for parameters with separate
    settings. Required unless ``optimizers`` is given. torch's SGD, Adam and AdamW are fused unless ``fused: false`` is
    given. Optimizers with train() and eval(), such as schedule-free optimizers, are in eval() mode during evaluation
    and export."""
    scheduler: Component | None = None
    """Any callable (optimizer) -> learning-rate scheduler; may use ${total_steps} and ${steps_per_epoch}. Schedulers in
    its arguments, as a SequentialLR has them, also get the optimizer."""
    optimizers: Mapping[str, NamedOptimizer] = {}
    """Several optimizers by name, instead of ``optimizer``, for a task (model, batch, update) that calls ``update(name,
    loss)`` for each of them. ``params`` lists the names of the parameters: ``{critic: {_target_: torch.optim.Adam,
    params: "critic.*"}}``. ``every: 5`` updates in every fifth step only. ``clip_grad_norm`` replaces
    train.clip_grad_norm for this optimizer."""
    schedulers: Mapping[str, Component] = {}
    """Schedulers of ``optimizers``, by the same names, instead of ``scheduler``. An optimizer may have no scheduler."""
    hooks: tuple[Component, ...] = ()
    """Your own additions to the training. Each is any callable that returns a pipeline.train.Hook, which may change
    batches and gradients, follow steps and evaluations, and save state in checkpoints (docs/extend.md). They are called
    after the built-in hooks, in the order of the list."""
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    benchmark: Benchmark = Benchmark()
    tracking: Tracking = Tracking()
    sweep: Sweep | None = None
    """Parameters that ``pipeline sweep`` varies; other commands ignore this section."""

    @model_validator(mode="before")
    @classmethod
    def _with_module(cls, value: Any) -> Any:
        """Fill in the model of a LightningModule and, unless the file names one, its optimizer and scheduler."""
        task = value.get("task") if isinstance(value, Mapping) else None
        if not isinstance(task, Mapping) or task.get("_target_") != LIGHTNING:
            return value
        filled = dict(value)
        if "module" in task and filled.get("model") is None:
            filled["model"] = task["module"]
            filled["task"] = {name: argument for name, argument in task.items() if name != "module"}
        if filled.get("optimizer") is None and not filled.get("optimizers"):
            filled["optimizer"] = {"_target_": LIGHTNING_OPTIMIZER, "total_steps": "${total_steps}"}
            if filled.get("scheduler") is None:
                train = value["train"] if isinstance(value.get("train"), Mapping) else {}
                metric = {"metric": train["scheduler_metric"]} if train.get("scheduler_metric") else {}
                interval = train.get("scheduler_interval", "step")
                filled["scheduler"] = {"_target_": LIGHTNING_SCHEDULER, "interval": interval, **metric}
        return filled

    @model_validator(mode="wrap")
    @classmethod
    def _with_global_batch_size(cls, value: Any, handler: ModelWrapValidatorHandler["Experiment"]) -> "Experiment":
        """Fill in the global batch size that ``train.batch_size_per_worker`` stands for."""
        experiment = handler(value)
        train, share = experiment.train, experiment.train.batch_size_per_worker
        if share is None or train.global_batch_size:
            return experiment
        filled = train.model_copy(update={"global_batch_size": share * experiment.parallel.workers})
        filled.model_fields_set.discard("global_batch_size")  # the file doesn't give it
        return experiment.model_copy(update={"train": filled})

    @property
    def is_lightning(self) -> bool:
        """True for an experiment with a LightningModule."""
        return self.task is not None and self.task.target == LIGHTNING

    @property
    def by_optimizer(self) -> Mapping[str, "Experiment"]:
        """Experiments with one of several optimizers each, and its scheduler, by its name; empty without several."""
        return {
            name: self.model_copy(
                update={"optimizer": one, "scheduler": self.schedulers.get(name), "optimizers": {}, "schedulers": {}}
            )
            for name, one in self.optimizers.items()
        }

    def batch_keys(self, global_batch_size: int) -> dict[str, int | None]:
        """Return the values of keys that make a global batch of a size: by worker if the file gives it by worker."""
        if self.train.batch_size_per_worker is None:
            return {"train.global_batch_size": global_batch_size}
        share, rest = divmod(global_batch_size, self.parallel.workers)
        if rest:
            return {"train.batch_size_per_worker": None, "train.global_batch_size": global_batch_size}
        return {"train.batch_size_per_worker": share}

    @property
    def followed(self) -> dict[str, str]:
        """Validation metrics that decide something in a training, by the key that names them."""
        stopping = self.train.early_stopping
        named = {
            "checkpoint.best": self.checkpoint.best,
            "train.early_stopping.metric": stopping.metric if stopping is not None else None,
            "train.scheduler_metric": self.train.scheduler_metric,
        }
        return {key: metric for key, metric in named.items() if metric is not None}
