"""The experiment file as frozen, strict types. Field descriptions end up in the JSON Schema that editors read."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)

from pipeline import registry
from pipeline.config.secrets import without_credentials
from pipeline.errors import ExperimentError, Problem


class Frozen(BaseModel):
    """Immutable, strict about keys, and the same after a round trip through JSON (NaN and infinity included)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )


class Component(Frozen):
    """``_target_: package.name`` with its keyword arguments; nested mappings with a ``_target_`` are built first."""

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, Field(alias="_target_", pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
    """Dotted name of a class or function in an allowed package."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The keyword arguments as written in the file (nested components are still plain mappings)."""
        return self.model_extra or {}


def _known(kind: registry.Kind) -> AfterValidator:
    def check(name: str) -> str:
        if name not in (known := registry.names(kind)):
            raise ValueError(f"unknown; choose one of {', '.join(known)}")
        return name

    return AfterValidator(check)


StrategyName = Annotated[str, _known("strategies")]
LauncherName = Annotated[str, _known("launchers")]
Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True)]


def _least_and_most(value: object) -> object:
    """``4`` as ``[4, 4]``.

    Raises:
        ValueError: neither a number nor two of them, the smaller one first.
    """
    both = [value, value] if isinstance(value, int) else value
    if not isinstance(both, list | tuple) or len(both) != 2 or any(type(n) is not int or n < 1 for n in both):
        where = f", in place of {json.dumps(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(f"write a whole number greater than 0, or two of them, [least, most]{where}")
    if both[0] > both[1]:
        raise ValueError(f"write the least first: [{both[1]}, {both[0]}]")
    return both


_COUNT = {"type": "integer", "exclusiveMinimum": 0}
WorkerCounts = Annotated[
    tuple[int, int],
    BeforeValidator(_least_and_most),
    PlainSerializer(lambda counts: counts[1] if counts[0] == counts[1] else list(counts), when_used="always"),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}]}),
]
"""The least and the most; one number stands for both."""


class LearningRateScaling(Frozen):
    """How the learning rate follows the global batch size (Goyal et al. 2017, arXiv 1706.02677, for ``linear``)."""

    rule: Literal["none", "linear", "sqrt"] = "none"
    """Factor on the optimizer's lr: 1, global/base, or its square root."""
    base_batch_size: Positive = 256
    """The global batch size that the optimizer's ``lr`` was chosen for."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from the unscaled to the scaled value."""


class Train(Frozen):
    """How long and how to train."""

    epochs: Positive
    """Passes over the training set."""
    global_batch_size: Positive
    """Samples in one optimizer step, over all workers. It never depends on the number of workers."""
    gradient_accumulation: Positive = 1
    """Micro-batches that each worker splits its share of a global batch into."""
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 use autocast; fp64 is for proofs that two runs train the same."""
    clip_grad_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this value."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient is NaN or infinite: stop; skip that step; or go back to the newest checkpoint and leave
    out that step's global batch, three times at most."""
    scheduler_interval: Literal["step", "epoch"] = "step"
    """When the scheduler advances."""
    lr_scaling: LearningRateScaling = LearningRateScaling()
    """Learning-rate scaling with the global batch size."""
    log_every_steps: Positive = 10
    """Steps between two reports; every step's loss is in the report."""
    evaluate_every_epochs: Positive = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""


class Loader(Frozen):
    """The DataLoader of each worker."""

    num_workers: NotNegative = 0
    """Loader processes for each worker; 0 loads in the training process."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked batches; auto: yes on a GPU."""
    persistent_workers: bool = True
    """Keep loader processes between epochs."""
    prefetch_factor: Positive = 2
    """Batches that each loader process prepares ahead."""
    collate: Component | None = None
    """A callable's factory for collate_fn; torch's default_collate otherwise."""


class Parallel(Frozen):
    """How the work is spread over devices, and who starts the workers."""

    strategy: StrategyName = "single"
    """single, dp, ddp, fsdp or another file of pipeline/strategies."""
    launcher: LauncherName = "inprocess"
    """inprocess, torchrun, ray or another file of pipeline/launchers."""
    worker_counts: Annotated[WorkerCounts, Field(alias="workers", json_schema_extra={"default": 1})] = (1, 1)
    """Processes, one device each. [1, 4]: as many as there is room for, 1 at least and 4 at most; training goes on with
    fewer when a node is lost, and with more when there is room."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs when there are any, else CPU; the plan says which."""
    cpus_per_worker: Positive | None = None
    """Cores and threads of each worker; default: this machine's cores divided by the workers."""
    gpus_per_worker: Positive | None = None
    """GPUs of each worker of a strategy that uses several, such as dp; default: all of a node. Others use one."""
    resources_per_worker: Mapping[str, PositiveFloat] = {}
    """Custom Ray resources that each worker occupies, by name."""
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    """How Ray places workers: on as few nodes as possible, over as many as possible, or each on a node of its own."""
    interface: str | None = None
    """Network interface for gloo and NCCL on all nodes; default: the one with the address by which Ray knows a node."""
    address: str | None = None
    """Address of a running Ray cluster; a local one is started otherwise. RAY_ADDRESS is read too."""
    ship_code: bool = True
    """Send the project's files that git tracks to a cluster; false where its nodes have them at the same path."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest wait until all workers have been placed and have met."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait in a collective operation before a missing rank is reported."""
    max_failures: NotNegative = 0
    """How often training goes on from the newest checkpoint after workers were lost, e.g. killed."""
    grace_s: PositiveFloat = 25.0
    """Longest wait for a checkpoint after SIGTERM; schedulers kill a job some 30 s after it."""
    options: Mapping[str, Any] = {}
    """The strategy's own options; ddp: sync_batch_norm, bucket_cap_mb, gradient_as_bucket_view, static_graph,
    find_unused_parameters, communication_hook (none, fp16, bf16, powersgd), powersgd_rank, powersgd_start_step;
    fsdp: groups, reshard_after_forward, cpu_offload, reduce_each_micro_batch, zero_unused_gradients."""

    @property
    def workers(self) -> int:
        """Processes, one device each; the most, if their number may change."""
        return self.worker_counts[1]

    @property
    def least_workers(self) -> int:
        """Processes without which training doesn't go on."""
        return self.worker_counts[0]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change in the middle of a training."""
        return self.least_workers < self.workers


class Checkpoint(Frozen):
    """When and where the state of training is saved: at the end of each epoch and of the run, and as written here."""

    every_steps: Positive | None = None
    """Steps between two checkpoints inside an epoch."""
    every_minutes: PositiveFloat | None = None
    """Longest time between two checkpoints; looked at whenever metrics are reported."""
    keep: NotNegative = 2
    """Newest checkpoints to keep; 0 saves none, and training can't be resumed."""
    best: Annotated[str, Field(pattern=r"^validation/.")] | None = None
    """A metric such as validation/accuracy: the checkpoint with its best value is kept besides."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether small or large values of ``best`` are good; auto: small if its name ends in loss or error."""
    directory: str | None = None
    """Folder or address (s3://bucket/folder) with one folder for each run; default: the run's own folder."""

    @property
    def minimizes(self) -> bool:
        """Whether small values of ``best`` are good."""
        return self.mode == "min" or (self.mode == "auto" and (self.best or "").endswith(("loss", "error")))


class Comparison(Frozen):
    """One entry of ``compare``: what differs from ``parallel``."""

    strategy: StrategyName
    """Strategy of this entry."""
    workers: Positive | None = None
    """Workers of this entry; default: parallel.workers where the strategy runs several processes, else 1."""
    options: Mapping[str, Any] = {}
    """The strategy's own options."""


class Measure(Frozen):
    """How throughput is measured in a short measurement such as the baseline."""

    warmup_steps: NotNegative = 3
    """Steps that are not counted."""
    steps: Positive = 5
    """Steps in one timed window."""
    windows: Positive = 3
    """Timed windows; median and spread are taken over them."""

    @property
    def total_steps(self) -> int:
        """Steps of one measurement."""
        return self.warmup_steps + self.steps * self.windows


class Tracking(Frozen):
    """Where results go."""

    uri: str = "sqlite:///mlflow.db"
    """MLflow tracking URI: sqlite:///FILE or a server's http(s) address."""
    experiment: str | None = None
    """MLflow experiment; default: this experiment's name."""
    directory: str = "runs"
    """Folder for the journal, the logs and the report of each run."""
    log_model: bool = True
    """Log the trained model to MLflow; the weights stay in the run's folder in any case."""

    @field_serializer("uri")
    def _written_without_credentials(self, uri: str) -> str:
        """They stay in the driver, which alone talks to the store: not in files, parameters or worker processes."""
        return without_credentials(uri)

    @field_validator("uri")
    @classmethod
    def _no_file_store(cls, uri: str) -> str:
        if "://" not in uri or uri.startswith("file:"):
            raise ValueError(
                "MLflow no longer keeps runs in plain folders; write sqlite:///mlflow.db or a server's http address"
            )
        return uri


class Experiment(Frozen):
    """One experiment: model, data and parallel strategy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the experiment: letters, digits, dot, dash and underscore."""
    seed: NotNegative = 0
    """Every random choice is a pure function of this seed and of the step, epoch or sample it belongs to."""
    model: Component
    """Any callable that returns a torch.nn.Module."""
    data: Component
    """Any callable that returns a training and a validation dataset (map-style; the second may be None)."""
    loader: Loader = Loader()
    loss: Component | None = None
    """Any callable (outputs, targets) -> scalar mean over the samples; needed unless ``task`` is given."""
    task: Component | None = None
    """A pipeline.tasks.Task, for what is not (inputs, targets) -> loss."""
    metrics: Mapping[str, Component] = {}
    """torchmetrics metrics of the validation set, by name."""
    optimizer: Component
    """Called with the model's parameters."""
    scheduler: Component | None = None
    """Called with the optimizer; may use ${total_steps} and ${steps_per_epoch}."""
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    compare: Annotated[tuple[Comparison, ...], Field(min_length=1)] = (Comparison(strategy="single"),)
    """What the run is compared with; the first entry is the baseline of the speedup."""
    measure: Measure = Measure()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(_contradictions(self)):
            raise ExperimentError(problems)
        return self


def _contradictions(experiment: Experiment) -> list[Problem]:
    """What no single field can know. All of it, not the first."""
    problems = []
    train, parallel = experiment.train, experiment.parallel
    if experiment.loss is None and experiment.task is None:
        problems.append(Problem("loss", "missing; write a loss, or a task that computes it"))
    if experiment.loss is not None and experiment.task is not None:
        problems.append(Problem("loss", "both loss and task are given; a task brings its own loss, remove one"))
    if train.global_batch_size < parallel.workers:
        problems.append(
            Problem(
                "train.global_batch_size",
                f"{train.global_batch_size} samples can't be shared by {parallel.workers} workers; "
                f"use at least {parallel.workers}, or fewer parallel.workers",
            )
        )
    if parallel.is_elastic and not experiment.checkpoint.keep:
        problems.append(
            Problem(
                "parallel.workers",
                f"is {list(parallel.worker_counts)}, but checkpoint.keep is 0, and another number of workers goes on "
                "from a checkpoint; write one number, or keep: 1",
            )
        )
    if "loss" in experiment.metrics:
        problems.append(Problem("metrics.loss", "validation/loss is reported anyway; give this metric another name"))
    if experiment.checkpoint.best is not None and not _is_reported(experiment.checkpoint.best, experiment):
        known = ", ".join(f"validation/{name}" for name in ("loss", *experiment.metrics))
        problems.append(
            Problem("checkpoint.best", f"is {experiment.checkpoint.best}, which isn't measured; choose one of {known}")
        )
    problems += _only_for_ray(parallel)
    for i, entry in enumerate(experiment.compare):
        if train.global_batch_size < (entry.workers or 1):
            problems.append(
                Problem(
                    f"compare[{i}].workers",
                    f"{entry.workers} workers can't share a global batch of {train.global_batch_size} samples; "
                    f"use at most {train.global_batch_size}",
                )
            )
    if parallel.options.get("communication_hook") == "powersgd" and train.precision == "fp16":
        problems.append(
            Problem(
                "parallel.options.communication_hook",
                "is powersgd, which would keep the infinities of fp16's overflows in what it sends later; "
                "use train.precision: bf16, or communication_hook: fp16",
            )
        )
    share = train.global_batch_size // parallel.workers
    if share and train.gradient_accumulation > share:
        problems.append(
            Problem(
                "train.gradient_accumulation",
                f"{train.gradient_accumulation} micro-batches of a worker's {share} samples; use at most {share}",
            )
        )
    return problems


def _only_for_ray(parallel: Parallel) -> Iterator[Problem]:
    """What would be ignored by launchers that start workers on this machine only."""
    if parallel.launcher in ("inprocess", "torchrun"):
        for name in ("placement", "resources_per_worker", "interface"):
            if getattr(parallel, name) != Parallel.model_fields[name].default:
                message = f"has no effect with launcher: {parallel.launcher}; write launcher: ray, or remove it"
                yield Problem(f"parallel.{name}", message)
    for name, key in (("CPU", "cpus_per_worker"), ("GPU", "gpus_per_worker")):
        if name in parallel.resources_per_worker:
            yield Problem(f"parallel.resources_per_worker.{name}", f"is not a custom resource; write parallel.{key}")


def _is_reported(metric: str, experiment: Experiment) -> bool:
    """Whether evaluation has a metric of this name; one with a value for each class is numbered: accuracy_0."""
    name = metric.removeprefix("validation/")
    return name == "loss" or any(
        name == known or re.fullmatch(rf"{re.escape(known)}_\d+", name) for known in experiment.metrics
    )
